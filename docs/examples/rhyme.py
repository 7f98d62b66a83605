"""Write the second line of a couplet: it must end in a rhyme and contain a keyword."""

import cedd
from cedd.constraints import intersect, regex

FIRST = "I walked alone into the night,\n"
RHYMES = ["light", "sight", "bright", "white", "delight"]


def second_lines(model: cedd.LanguageModel, keyword: str, n: int, seed: int, length: int = 32) -> list[str]:
    """Lines with the keyword that rhyme with the first."""
    line = regex("[A-Z][a-z]*( [a-z]+){5,8}")
    has_keyword = regex(f".* {keyword} .*")
    rhymes = regex(f".* ({'|'.join(RHYMES)})")
    constraint = intersect(line, has_keyword, rhymes)
    texts = model.generate(
        n, prompt=FIRST, constraint=constraint, sampler="first-hitting", temperature=0.8, seed=seed, length=length
    )
    return [text[len(FIRST) :] for text in texts]


if __name__ == "__main__":
    for line in second_lines(cedd.load("english"), "moon", 3, seed=1):
        print(FIRST + line + "\n")
