"""A sentence about a person or an order, and JSON with the keys asked for."""

import json
import random
from collections.abc import Callable

from train.sample import Sample, Split, belongs, user
from train.words import FIRST_NAMES, JOBS, LAST_NAMES, PLACES, PRODUCTS, made_up_name

Value = str | int
PERSONS = (
    "{name} is {age} years old, lives in {city} and works as a {job}.",
    "{name}, {age}, is a {job} from {city}.",
    "The {job} {name} from {city} is {age} years old.",
    "In {city} lives {name}, a {job} aged {age}.",
    "At the age of {age}, {name} works as a {job} in {city}.",
    "My neighbour {name} is a {job}; {name} is {age} and was born in {city}.",
    "{name} moved to {city} at {age} and became a {job}.",
)
ORDERS = (
    "{customer} ordered {quantity} {product} for {price} dollars, to be sent to {city}.",
    "An order of {quantity} {product} by {customer} from {city} costs {price} dollars.",
    "Please send {quantity} {product} to {customer} in {city}; the price is {price} dollars.",
    "{customer} from {city} bought {quantity} {product} and paid {price} dollars.",
    "For {price} dollars, {customer} in {city} gets {quantity} {product}.",
    "We shipped {quantity} {product} to {city}, where {customer} paid {price} dollars.",
)
REQUESTS = (
    "Extract {keys} as JSON.\n{sentence}",
    "Return JSON with the keys {keys}.\n{sentence}",
    "{sentence}\nGive me JSON with the keys {keys}.",
    "Read the sentence and answer with JSON. Keys: {keys}.\nSentence: {sentence}",
    "{sentence}\nWrite this as JSON with {keys}.",
    "Turn this into JSON with the keys {keys}: {sentence}",
)


def _name(rng: random.Random, split: Split) -> str:
    if split is Split.TRAIN and rng.random() < 0.2:
        return f"{made_up_name(rng)} {made_up_name(rng)}"
    first = rng.choice(FIRST_NAMES)
    return f"{first} {rng.choice(LAST_NAMES)}" if rng.random() < 0.7 else first


def _city(rng: random.Random, split: Split) -> str:
    return made_up_name(rng) if split is Split.TRAIN and rng.random() < 0.15 else rng.choice(PLACES)


def _person(rng: random.Random, split: Split) -> tuple[str, dict[str, Value]]:
    fields: dict[str, Value] = {
        "name": _name(rng, split),
        "age": rng.randint(18, 90),
        "city": _city(rng, split),
        "job": rng.choice(JOBS),
    }
    sentence = rng.choice(PERSONS).format(**fields)
    return sentence.replace(" a a", " an a").replace(" a e", " an e"), fields


def _order(rng: random.Random, split: Split) -> tuple[str, dict[str, Value]]:
    fields: dict[str, Value] = {
        "customer": _name(rng, split),
        "product": rng.choice(PRODUCTS),
        "quantity": rng.randint(2, 99),
        "price": rng.randint(3, 999),
        "city": _city(rng, split),
    }
    return rng.choice(ORDERS).format(**fields), fields


def spell_keys(rng: random.Random, keys: list[str]) -> str:
    """`name, age and city`, or the same with quotes around each key."""
    spelled = [f'"{key}"' for key in keys] if rng.random() < 0.4 else keys
    return f"{', '.join(spelled[:-1])} and {spelled[-1]}" if len(spelled) > 1 else spelled[0]


def make_json(rng: random.Random, split: Split) -> Sample:
    """Between two and all of the sentence's fields, in any order; strings and integers; exact compact JSON."""
    make: Callable[[random.Random, Split], tuple[str, dict[str, Value]]] = rng.choice((_person, _order))
    sentence, fields = make(rng, split)
    while not belongs(sentence, split):
        sentence, fields = make(rng, split)
    keys = rng.sample(list(fields), rng.randint(2, len(fields)))
    expected = {key: fields[key] for key in keys}
    question = rng.choice(REQUESTS).format(keys=spell_keys(rng, keys), sentence=sentence)
    answer = json.dumps(expected, separators=(",", ":"), ensure_ascii=False)
    return Sample("json", [user(question)], False, answer, expected)
