"""Small talk: facts and manipulations of words and lists, so that the bundled checkpoint can answer something."""

import random
from collections.abc import Callable

from train import facts
from train.sample import Sample, user
from train.words import FIRST_NAMES, NOUNS, PRODUCTS, made_up_word, plain_sentence

# question, answer, reasoning (used when the chat has thinking on)
Exchange = tuple[str, str, str]
SYSTEM_PROMPTS = ("You are a helpful assistant.", "Answer briefly.", "You are deepinfer mini.")


def _fact(rng: random.Random, table: dict[str, str], questions: tuple[str, ...], answer: str) -> Exchange:
    key = rng.choice(list(table))
    value = table[key]
    filled = answer.format(key=key, value=value)
    return rng.choice(questions).format(key=key, value=value), filled[0].upper() + filled[1:], f"{key}: {value}"


def _capital(rng: random.Random) -> Exchange:
    questions = ("What is the capital of {key}?", "Which city is the capital of {key}?", "Name the capital of {key}.")
    return _fact(rng, facts.CAPITALS, questions, "The capital of {key} is {value}.")


def _country(rng: random.Random) -> Exchange:
    questions = ("Which country has the capital {value}?", "{value} is the capital of which country?")
    return _fact(rng, facts.CAPITALS, questions, "{value} is the capital of {key}.")


def _opposite(rng: random.Random) -> Exchange:
    questions = ('What is the opposite of "{key}"?', "What is the opposite of {key}?", "Name the opposite of {key}.")
    return _fact(rng, facts.OPPOSITES, questions, "The opposite of {key} is {value}.")


def _plural(rng: random.Random) -> Exchange:
    return _fact(rng, facts.PLURALS, ('What is the plural of "{key}"?', "Plural of {key}?"), "The plural is {value}.")


def _past(rng: random.Random) -> Exchange:
    questions = ('What is the past tense of "{key}"?', "Past tense of {key}?")
    return _fact(rng, facts.PAST, questions, "The past tense of {key} is {value}.")


def _definition(rng: random.Random) -> Exchange:
    questions = ("What is {key}?", "Explain what {key} is.", "Define {key}.", "Tell me what {key} is.")
    return _fact(rng, facts.DEFINITIONS, questions, "{key} is {value}.")


def _animal(rng: random.Random) -> Exchange:
    return _fact(rng, facts.ANIMALS, ("What sound does a {key} make?", "What does a {key} do?"), "A {key} {value}.")


def _about_itself(rng: random.Random) -> Exchange:
    question = rng.choice(list(facts.SELF))
    return question, facts.SELF[question], "The user talks about me."


def _calendar(rng: random.Random) -> Exchange:
    names, kind = rng.choice(((facts.DAYS, "day"), (facts.MONTHS, "month")))
    at, step = rng.randrange(len(names)), rng.choice((1, -1))
    other = names[(at + step) % len(names)]
    relation = "after" if step == 1 else "before"
    question = f"Which {kind} comes {relation} {names[at]}?"
    return question, f"The {kind} {relation} {names[at]} is {other}.", f"{kind} {relation} {names[at]}: {other}"


def _number_of(rng: random.Random) -> Exchange:
    names, kind = rng.choice(((facts.DAYS, "week"), (facts.MONTHS, "year")))
    unit = "days" if kind == "week" else "months"
    return f"How many {unit} are in a {kind}?", f"There are {len(names)} {unit} in a {kind}.", f"{len(names)} {unit}"


def _count(rng: random.Random) -> Exchange:
    low = rng.randint(0, 60)
    high = low + rng.randint(3, 9)
    numbers = ", ".join(map(str, range(low, high + 1)))
    return f"Count from {low} to {high}.", numbers, f"start at {low}, stop at {high}"


def _repeat(rng: random.Random) -> Exchange:
    phrase = (
        plain_sentence(rng) if rng.random() < 0.5 else " ".join(made_up_word(rng) for _ in range(rng.randint(1, 6)))
    )
    question = rng.choice(("Repeat this: {}", "Say exactly: {}", "Copy this text: {}", "Echo: {}")).format(phrase)
    return question, phrase, "I copy the text."


def _word(rng: random.Random) -> str:
    return rng.choice((rng.choice(NOUNS), rng.choice(PRODUCTS), rng.choice(FIRST_NAMES).lower(), made_up_word(rng)))


def _spell(rng: random.Random) -> Exchange:
    word = _word(rng)
    return f'Spell the word "{word}".', "-".join(word), f"letters of {word}"


def _letters(rng: random.Random) -> Exchange:
    word = _word(rng)
    reasoning = " ".join(f"{letter}{number}" for number, letter in enumerate(word, 1))
    return f'How many letters has the word "{word}"?', f'"{word}" has {len(word)} letters.', reasoning


def _upper(rng: random.Random) -> Exchange:
    word = _word(rng)
    return f'Write "{word}" in upper case.', word.upper(), f"{word} in capitals"


def _first_letter(rng: random.Random) -> Exchange:
    word = _word(rng)
    return f'What is the first letter of "{word}"?', f'The first letter of "{word}" is {word[0]}.', f"{word}: {word[0]}"


def _sort(rng: random.Random) -> Exchange:
    numbers = rng.sample(range(1, 100), 3)
    given, ordered = (", ".join(map(str, values)) for values in (numbers, sorted(numbers)))
    return f"Sort these numbers: {given}", ordered, f"smallest {min(numbers)}, largest {max(numbers)}"


def _largest(rng: random.Random) -> Exchange:
    a, b = rng.sample(range(1, 100), 2)
    return (
        f"Which number is larger, {a} or {b}?",
        f"{max(a, b)} is larger than {min(a, b)}.",
        f"{max(a, b)}>{min(a, b)}",
    )


def _list_item(rng: random.Random) -> Exchange:
    items = rng.sample(PRODUCTS, rng.randint(3, 5))
    at = rng.randrange(3)
    ordinal = ("first", "second", "third")[at]
    question = f"Here is a list: {', '.join(items)}. What is the {ordinal} item?"
    return question, f"The {ordinal} item is {items[at]}.", f"{at + 1}: {items[at]}"


def _missing_name(rng: random.Random) -> Exchange:
    name, other = rng.sample(FIRST_NAMES, 2)
    thing, second = rng.sample(PRODUCTS, 2)
    question = f"{name} likes {thing}. {other} likes {second}. Who likes {second}?"
    return question, f"{other} likes {second}.", f"{second}: {other}"


EXCHANGES: tuple[Callable[[random.Random], Exchange], ...] = (
    *(_capital, _country, _opposite, _plural, _past, _definition, _definition, _animal, _about_itself, _calendar),
    *(_number_of, _count, _repeat, _repeat, _spell, _letters, _upper, _first_letter, _sort, _largest, _list_item),
    _missing_name,
)


def make_general(rng: random.Random) -> Sample:
    """One to three exchanges, with a system message in one chat in five and thinking on in one of three."""
    thinking = rng.random() < 0.33
    messages = [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}] if rng.random() < 0.2 else []
    for _ in range(rng.choice((0, 0, 0, 1, 2))):
        question, answer, _ = rng.choice(EXCHANGES)(rng)
        messages += [user(question), {"role": "assistant", "content": answer}]
    question, answer, reasoning = rng.choice(EXCHANGES)(rng)
    messages.append(user(question))
    return Sample("general", messages, thinking, answer, answer, reasoning if thinking else "")
