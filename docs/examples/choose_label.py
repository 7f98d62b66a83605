"""Choose a label with its probability: the model's probability of a text that contains the label."""

import cedd

LABELS = ["cooking", "music", "sports", "weather"]
TEXTS = [
    "The orchestra played the second symphony",
    "Boil the potatoes and add salt and butter",
    "It will rain in the north and snow will follow",
]


def label(model: cedd.LanguageModel, text: str) -> dict[str, float]:
    """The probability of each label among these, the most probable first."""
    return model.classify(text, LABELS, "{text}. This was an article about {label}.").probabilities


if __name__ == "__main__":
    model = cedd.load("english")
    for text in TEXTS:
        found = label(model, text)
        print(f"{next(iter(found)):8} {' '.join(f'{name} {p:.2f}' for name, p in found.items())}  {text}")
