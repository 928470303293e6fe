"""Word lists from which exercises are made."""

import random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FIRST_NAMES = _words(
    """Anna Ben Clara David Emma Felix Grace Henry Iris Jack Karen Leo Maria Noah Olivia Peter Quinn Rosa Samuel Tina
    Umar Vera Walter Xenia Yusuf Zoe Alice Bruno Carmen Daniel Elena Frank Gina Hugo Irene James Kira Lucas Mona Nina
    Oscar Paula Robert Sara Thomas Ursula Victor Wendy Adam Bella Carl Diana Eric Fiona George Helen Ivan Julia Kevin
    Laura Martin Nora Otto Petra Ralph Sofia Tom Una Vincent Wanda Arthur Beth Colin Dora Edgar Flora Gustav Hanna
    Igor Jenny Kurt Linda Mark Nadia Owen Pia Rita Simon Tara Viktor Willa Aaron Bianca Chen Deepa Emil Farah Goran
    Hiro Ines Jonas Kofi Lena Mei Nico Omar Priya Rahim Selma Tariq Yara Zack Amir Berta Cyril Dina Elias Freya"""
)
LAST_NAMES = _words(
    """Adams Baker Clark Davis Evans Fisher Green Harris Irwin Jones King Lewis Miller Nelson Owens Parker Quigley Reed
    Smith Taylor Underwood Vance Walker Young Zimmer Allen Brown Carter Dixon Edwards Ford Grant Hill Ingram Jackson
    Kelly Lopez Moore Newman Olsen Price Ross Stone Turner Vega White Yates Abbott Bishop Cole Drake Ellis Frost Gray
    Hunt Johnson Knight Lambert Marsh Nash Ortega Palmer Rivera Shaw Tucker Vaughn Wagner Weber Schmidt Novak Kumar
    Tanaka Silva Rossi Martin Larsen Haas Bauer Petrov Santos Costa Fischer Berg Lind Moreau Dubois Okafor Singh Park
    Nguyen Wong Ali Hassan Ibrahim Kowalski Horvath Jensen Virtanen Murphy Byrne"""
)
CITIES = _words(
    "Paris London Berlin Madrid Rome Vienna Prague Warsaw Lisbon Dublin Oslo Stockholm Helsinki Athens Budapest "
    "Brussels Amsterdam Zurich Geneva Munich Hamburg Milan Naples Barcelona Seville Porto Lyon Krakow Riga Tallinn "
    "Boston Chicago Denver Seattle Austin Dallas Houston Miami Atlanta Toronto Montreal Vancouver Lima Bogota Quito "
    "Santiago Cairo Nairobi Lagos Accra Tunis Casablanca Tokyo Osaka Kyoto Seoul Beijing Shanghai Singapore Bangkok "
    "Hanoi Manila Jakarta Delhi Mumbai Sydney Melbourne Perth Auckland Wellington"
)
CITIES_OF_TWO_WORDS = ("New York", "San Diego", "Hong Kong", "Cape Town", "Mexico City", "Buenos Aires", "Kuala Lumpur")
PLACES = (*CITIES, *CITIES_OF_TWO_WORDS)
JOBS = (
    "teacher",
    "nurse",
    "doctor",
    "engineer",
    "pilot",
    "chef",
    "farmer",
    "lawyer",
    "painter",
    "writer",
    "plumber",
    "baker",
    "driver",
    "dentist",
    "librarian",
    "musician",
    "carpenter",
    "gardener",
    "electrician",
    "journalist",
    "architect",
    "mechanic",
    "waiter",
    "tailor",
    "scientist",
    "programmer",
    "translator",
    "photographer",
    "firefighter",
    "accountant",
    "police officer",
    "data analyst",
    "shop assistant",
    "truck driver",
    "bus driver",
    "music teacher",
)
PRODUCTS = _words(
    "pencils books chairs lamps apples oranges bottles notebooks shirts shoes cups plates knives towels candles "
    "batteries cables keyboards screens printers tables pillows blankets hammers screws bricks flowers tickets posters "
    "stamps envelopes umbrellas backpacks bicycles helmets gloves socks hats jackets toys puzzles radios clocks mugs "
    "spoons forks baskets boxes tiles ropes"
)
COLOURS = _words("red blue green yellow black white brown grey purple orange pink silver golden")
THINGS = _words(
    "door gate box safe locker garage cellar tower bridge garden office drawer cabinet library kitchen boat truck "
    "cave chest vault elevator barn attic studio"
)
NOUNS = _words(
    "river mountain window teacher market bird street engine letter forest doctor table station village winter summer "
    "morning evening harbour bridge garden music paper stone horse farmer child worker captain ship road field cloud "
    "storm kitchen school museum theatre island valley train bicycle painter neighbour visitor lamp clock picture"
)
ADJECTIVES = _words(
    "quiet old small bright heavy gentle cold warm narrow wide green distant busy empty famous simple strange wooden "
    "careful tired happy early late tall young"
)
VERBS = _words(
    "followed watched found remembered crossed reached painted repaired described visited carried opened closed "
    "noticed measured admired left forgot moved passed"
)

_ONSETS = _words("b c d f g h j k l m n p r s t v w z br ch cl dr fl gr pl pr sh sl st th tr")
_VOWELS = _words("a e i o u ai ea ie oo ou")
_CODAS = ["", "", "", "l", "n", "r", "s", "t", "m", "nd", "rk", "st"]


def made_up_word(rng: random.Random) -> str:
    """A word nobody knows, of one to three syllables, so that copying cannot lean on memory."""
    syllables = range(rng.randint(1, 3))
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in syllables)


def made_up_name(rng: random.Random) -> str:
    """A capitalised made-up word of at least four letters."""
    word = made_up_word(rng)
    return (word if len(word) > 3 else word + made_up_word(rng)).capitalize()


def article(word: str) -> str:
    """The word with its indefinite article."""
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def plain_sentence(rng: random.Random) -> str:
    """A harmless sentence about nothing."""
    noun, other, third = rng.sample(NOUNS, 3)
    adjective, second = rng.sample(ADJECTIVES, 2)
    form = rng.randrange(5)
    if form == 0:
        return f"The {adjective} {noun} {rng.choice(VERBS)} the {second} {other}."
    if form == 1:
        return f"Near the {noun} there was {article(adjective)} {other}."
    if form == 2:
        return f"Every {adjective} {noun} needs {article(second)} {other} and {article(third)}."
    if form == 3:
        return f"{rng.choice(FIRST_NAMES)} {rng.choice(VERBS)} the {noun} behind the {adjective} {other}."
    return f"In {rng.choice(CITIES)} the {noun} is {adjective} and the {other} is {second}."
