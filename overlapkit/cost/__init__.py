"""How long a step takes and where the time goes: Facts + Plan + Volume -> :class:`overlapkit.cost.result.Estimate`."""
