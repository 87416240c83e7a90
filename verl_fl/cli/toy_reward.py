"""The toy task's reward: how much of the answer consists of the characters that the prompt asks for.

verl calls ``compute_score`` once for every answer. A file like this one is all that a task of your own needs.
"""

ANSWER_LENGTH = 16
CHARACTERS = {"digits": "0123456789", "vowels": "aeiou"}


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return the share, from 0 to 1, of right characters; an answer that stops early loses what it leaves out."""
    right = sum(solution_str.count(character) for character in CHARACTERS[ground_truth])
    return right / max(len(solution_str), ANSWER_LENGTH)
