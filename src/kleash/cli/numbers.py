"""Sentences of the report in the characters of the terminal."""


def terminal_sentence(text: str) -> str:
    """A sentence of the report with the spaces and minus signs of the terminal's tables."""
    for typographic, plain in (("\u202f%", " %"), ("\u202f", ","), ("−", "-")):
        text = text.replace(typographic, plain)
    return text
