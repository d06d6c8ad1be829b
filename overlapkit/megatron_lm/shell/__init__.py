"""Launch scripts read without running them: shell text -> tree -> the launches that it may lead to.

A parser of its own, because the files are nobody's trusted input: every step here is linear or counted.
Syntax and expansions are those of bash, as its manual states them; what only a run could tell stays unknown.
"""
