"""One shape for every message a user can cause: what was asked, what was found, what is legal, what to do."""


def explain(problem: str, *, asked: object = None, found: object = None, legal: object = None, fix: str = "") -> str:
    """Return ``problem`` followed by the parts that are given, one a line."""
    parts = [("asked", asked), ("found", found), ("legal", legal), ("do", fix or None)]
    lines = [f"  {name}: {value}" for name, value in parts if value is not None]
    return "\n".join([problem, *lines])
