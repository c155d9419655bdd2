"""Names and sentences of the report in the characters of the terminal."""

from kleash.store.statistics import label_of


def terminal_label(name: str) -> str:
    """The report's label of a column or mean, with "||" in place of "‖"."""
    return label_of(name).replace("‖", "||")


def terminal_sentence(text: str) -> str:
    """A sentence of the report in the characters of the terminal's tables."""
    for typographic, plain in (("‖", "||"), ("\u202f%", " %"), ("\u202f", ","), ("−", "-")):
        text = text.replace(typographic, plain)
    return text
