"""``python -m overlapkit.integrations.megatron --check recipe.yaml``: a launch script's look at its environment."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from overlapkit.errors import OverlapkitError, printable
from overlapkit.streams import prepare_streams

_DONE = """exit status: 0 all variables are as the plan wants them, 1 some are not, 2 the recipe cannot be used

example: python -m overlapkit.integrations.megatron --check recipe.yaml && torchrun ... pretrain.py"""


def main(arguments: Sequence[str] | None = None) -> int:
    """One line per finding on stderr, and the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m overlapkit.integrations.megatron",
        description="Compares the environment of this process with what a recipe's plan wants.",
        epilog=_DONE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--check", metavar="RECIPE", required=True, help="a YAML recipe, or a dump of Megatron-Bridge")
    parser.add_argument("overrides", nargs="*", metavar="SECTION.KEY=VALUE", help="overrides, applied in order")
    given = parser.parse_args(arguments)
    try:
        from overlapkit.integrations.megatron.environment import check_environment
        from overlapkit.recipe import load_recipe

        findings = check_environment(load_recipe(given.check, given.overrides))
    except OverlapkitError as error:
        print(f"overlapkit: {error}", file=sys.stderr)
        return error.exit_code
    for finding in findings:
        print(printable(f"overlapkit: {finding}", limit=600), file=sys.stderr)
    return int(bool(findings))


if __name__ == "__main__":
    prepare_streams()
    sys.exit(main())
