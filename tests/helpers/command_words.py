"""The words of a command line."""


def words(*first: object, **options: object) -> list[str]:
    """``words("measure", out=path, quiet=True)`` is ``measure --out path --quiet``; an option of None is left out."""
    made = [str(word) for word in first]
    for name, value in options.items():
        if value is not None:
            made.append(f"--{name.replace('_', '-')}")
        if value is not None and value is not True:
            made.append(str(value))
    return made
