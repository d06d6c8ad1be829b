"""Layouts of a recipe, judged by the rules and their memory, and ranked by predicted step time.

Recipe -> :mod:`space` (which layouts there are) -> :mod:`feasible` (what the rules refuse) and memory ->
:mod:`timing` -> :mod:`ranking` (the best, and the Pareto front); :mod:`work` spreads it over processes, and
:mod:`find` asks the rules and the estimate themselves about every layout that is shown.
"""
