"""Extract a date from a sentence into JSON: a real day, whose day and year are in the sentence.

The constraint guarantees this. The month is the model's choice, and a small model is often wrong.
"""

import calendar
import json
import re
import sys

import cedd
from cedd.constraints import Language, intersect, json_schema, regex

SCHEMA = {"type": "object", "properties": {"date": {"type": "string", "format": "date"}}, "required": ["date"]}
TABLE = ", ".join(f"{number:02} = {name}" for number, name in enumerate(calendar.month_name) if number)
PROMPT = TABLE + '.\nIt was finished on 17 May 1887. {{"date": "1887-05-17"}}\n{sentence} '


def dates(sentence: str) -> Language:
    """JSON with a date made of a year and a day that are in the sentence, and any month."""
    numbers = re.findall(r"[0-9]+", sentence)
    years, days = ([one.zfill(2) for one in numbers if (len(one) == 4) == is_year] for is_year in (True, False))
    copied = regex(f".*({'|'.join(years)})-[0-9]*-({'|'.join(days)}).*")
    return intersect(json_schema({**SCHEMA, "additionalProperties": False}, whitespace=" "), copied)


def extract(model: cedd.LanguageModel, sentence: str) -> str:
    """The date of a sentence, as ISO 8601; at temperature 0 the most confident token is kept in each step."""
    prompt = PROMPT.format(sentence=sentence)
    (text,) = model.generate(prompt=prompt, constraint=dates(sentence), sampler="probability", temperature=0)
    return json.loads(text[len(prompt) :])["date"]


if __name__ == "__main__":
    sentence = sys.argv[1] if len(sys.argv) > 1 else "The school burned down on 9 August 1903."
    print(extract(cedd.load("english"), sentence))
