"""Fill a form: a text with blanks, each with its own constraint."""

import cedd
from cedd.constraints import choice, regex

FORM = """Name: ____{6}
Born in: ____{4}
Occupation: ____{3}
She was born in London in 1874, worked as a nurse, and her name was Mary Hill.
"""
FIELDS = [
    regex("[A-Z][a-z]+ [A-Z][a-z]+"),  # a name
    regex("1[89][0-9][0-9]"),  # a year
    choice(["doctor", "lawyer", "nurse", "teacher"]),
]


def fill(model: cedd.LanguageModel, n: int, seed: int) -> list[str]:
    """The form, filled in n ways. The model reads the text after the blanks too."""
    filled = model.infill(FORM, n, constraint=FIELDS, sampler="first-hitting", temperature=0.7, seed=seed)
    return [filled] if isinstance(filled, str) else filled


if __name__ == "__main__":
    for form in fill(cedd.load("english"), 2, seed=1):
        print(form)
