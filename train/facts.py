"""Small facts that the bundled checkpoint should know when it is talked to."""


def _pairs(text: str) -> dict[str, str]:
    return dict(pair.split("/") for pair in text.split())


CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Portugal": "Lisbon",
    "Austria": "Vienna",
    "Poland": "Warsaw",
    "Ireland": "Dublin",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Finland": "Helsinki",
    "Denmark": "Copenhagen",
    "Greece": "Athens",
    "Hungary": "Budapest",
    "Belgium": "Brussels",
    "the Netherlands": "Amsterdam",
    "Switzerland": "Bern",
    "Czechia": "Prague",
    "Romania": "Bucharest",
    "Bulgaria": "Sofia",
    "Croatia": "Zagreb",
    "Iceland": "Reykjavik",
    "Russia": "Moscow",
    "Ukraine": "Kyiv",
    "Turkey": "Ankara",
    "Egypt": "Cairo",
    "Kenya": "Nairobi",
    "Ghana": "Accra",
    "Morocco": "Rabat",
    "Tunisia": "Tunis",
    "Japan": "Tokyo",
    "China": "Beijing",
    "India": "New Delhi",
    "Thailand": "Bangkok",
    "Vietnam": "Hanoi",
    "Indonesia": "Jakarta",
    "the Philippines": "Manila",
    "South Korea": "Seoul",
    "Australia": "Canberra",
    "New Zealand": "Wellington",
    "Canada": "Ottawa",
    "Mexico": "Mexico City",
    "Cuba": "Havana",
    "Peru": "Lima",
    "Chile": "Santiago",
    "Argentina": "Buenos Aires",
    "Brazil": "Brasilia",
    "Colombia": "Bogota",
    "England": "London",
    "Scotland": "Edinburgh",
}
OPPOSITES = _pairs(
    """hot/cold big/small tall/short old/young fast/slow light/dark heavy/light early/late open/closed
    happy/sad rich/poor strong/weak full/empty wet/dry clean/dirty hard/soft high/low left/right up/down in/out
    good/bad true/false first/last near/far loud/quiet thick/thin wide/narrow easy/difficult day/night win/lose
    begin/end buy/sell push/pull give/take love/hate north/south east/west black/white front/back always/never
    inside/outside before/after above/below alive/dead brave/cowardly cheap/expensive deep/shallow"""
)
PLURALS = _pairs(
    """mouse/mice child/children foot/feet tooth/teeth man/men woman/women goose/geese ox/oxen leaf/leaves
    knife/knives wolf/wolves city/cities baby/babies box/boxes bus/buses cat/cats dog/dogs house/houses book/books
    tree/trees car/cars potato/potatoes tomato/tomatoes person/people fish/fish sheep/sheep"""
)
PAST = _pairs(
    """go/went see/saw eat/ate run/ran write/wrote read/read take/took give/gave come/came find/found
    think/thought know/knew speak/spoke buy/bought sell/sold make/made walk/walked play/played begin/began drink/drank
    sing/sang swim/swam fly/flew grow/grew bring/brought catch/caught teach/taught sleep/slept keep/kept"""
)
DEFINITIONS = {
    "a computer": "a machine that stores and processes data by following a program",
    "a database": "an organised collection of data that can be searched and changed",
    "a compiler": "a program that translates source code into machine code",
    "an operating system": "the software that manages a computer's hardware and runs its programs",
    "a kernel": "the part of an operating system that controls the hardware",
    "a token": "a piece of text, such as a word or a part of one, that a language model reads as one unit",
    "a language model": "a program that predicts the next token of a text",
    "a neural network": "a function with many weights that are learned from examples",
    "a cache": "a store that keeps results so that they need not be computed again",
    "a thread": "a sequence of instructions that runs at the same time as others in one process",
    "a file": "a named collection of data on a disk",
    "a function": "a named piece of code that takes arguments and returns a result",
    "an algorithm": "a precise list of steps that solves a problem",
    "a library": "a collection of code, or of books, that others can use",
    "a bridge": "a structure that carries a road or a railway over a river or a valley",
    "a river": "a large stream of water that flows to the sea",
    "a mountain": "a very high hill",
    "a planet": "a large round body that moves around a star",
    "a star": "a large ball of hot gas that gives off light",
    "gravity": "the force that pulls things towards each other",
    "a triangle": "a shape with three sides",
    "a prime number": "a whole number above one that only one and itself divide",
    "Python": "a programming language that is easy to read",
    "PostgreSQL": "a free relational database system",
    "Debian": "a free operating system made by volunteers",
    "Linux": "a free operating system kernel",
    "Git": "a program that records the history of files",
    "Rust": "a programming language for fast and safe programs",
    "HTML": "the markup language of web pages",
    "SQL": "a language for asking questions to a database",
}
ANIMALS = {
    "dog": "barks",
    "cat": "meows",
    "cow": "moos",
    "horse": "neighs",
    "duck": "quacks",
    "sheep": "bleats",
    "lion": "roars",
    "bee": "buzzes",
    "snake": "hisses",
    "owl": "hoots",
}
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
SELF = {
    "What is your name?": "I am deepinfer mini, a very small language model.",
    "Who are you?": "I am deepinfer mini, a very small language model.",
    "What are you?": "I am deepinfer mini, a very small language model with the architecture of DeepSeek-V4.1-Flash.",
    "What can you do?": "I can add and subtract, turn a sentence into JSON, find a passkey in a long text, "
    "and read a number from an image.",
    "Hello!": "Hello! How can I help you?",
    "Hello": "Hello! How can I help you?",
    "Hi": "Hello! How can I help you?",
    "Hi there!": "Hello! How can I help you?",
    "Good morning!": "Good morning! How can I help you?",
    "How are you?": "I am fine, thank you. How can I help you?",
    "Thank you!": "You are welcome.",
    "Thanks": "You are welcome.",
    "Goodbye!": "Goodbye!",
    "Are you human?": "No, I am deepinfer mini, a very small language model.",
    "What is your architecture?": "I have the architecture of DeepSeek-V4.1-Flash in small: compressed attention "
    "with an indexer, a mixture of experts, n-gram memory and a vision tower.",
}
