"""Text that every lossy export is measured on: passages of several kinds, in none of which the smoothing text occurs.

Written for this purpose, so no model has been trained on it word for word.
"""

from __future__ import annotations

from tokenizers import Tokenizer

from streamspec.adapters.dataset.token_rows import TokenRow
from streamspec.bundle.precision_cost import TEXT
from streamspec.export.spec.decoder_spec import DecoderSpec
from streamspec.layer_cache import DTYPES

TOKENS, LEAST = 1536, 384  # of all passages, for a small model and for a large one
WORK = 1e12  # products that PyTorch may take for it: seconds

PASSAGES = (
    "The ferry to the island left at six, or when the captain had finished his coffee, whichever came later. This "
    "morning there were four passengers: a vet with a cardboard box that sometimes moved, two brothers who had not "
    "spoken since the harbour, and Ida, who had been sent to close the school. She had the letter in her coat. It said "
    "that nine children were too few, that the roof would cost more than a teacher, and that a bus would be provided "
    "on the mainland. It did not say how the bus would cross the water.\n\n"
    "Halfway over, the engine coughed and stopped. The captain did not seem surprised. He lifted a hatch, said "
    "something to the machine that the vet pretended not to hear, and asked the older brother to hold a lamp. The "
    "younger brother went to help before anybody had asked him. For twenty minutes the boat turned slowly in the "
    "current while the three of them passed tools to each other, and by the time the engine started again the "
    "brothers were arguing about a fence, which was at least a beginning.\n\n"
    "Ida watched the island grow. There was a white house with a bell on the roof, and in front of it stood nine "
    "children in a row, sorted by height, holding a sign. She could not read it yet. She found that she was folding "
    "the letter, once and then again, until it was small enough to lose.\n",
    "Glaciers are often described as frozen rivers, and the comparison is better than it sounds. Snow that falls in "
    "the upper part of a valley does not melt completely in summer. Each year's layer buries the one before, and the "
    "weight of the new snow presses the air out of the old until it becomes dense, blue ice. Once the ice is about "
    "thirty metres thick, it begins to flow under its own weight. The surface moves faster than the bed, because the "
    "rock below holds the lowest layer back, and the middle moves faster than the sides for the same reason. Most "
    "valley glaciers travel between ten and three hundred metres in a year.\n\n"
    "The balance between snowfall and melting decides whether a glacier advances or retreats. When more ice is lost at "
    "the lower end than arrives from above, the front moves up the valley, although the ice itself never flows "
    "backwards. The traces it leaves are easy to recognise: ridges of broken stone called moraines, polished rock with "
    "long parallel scratches, and lakes in hollows that the ice had dug. Geologists read these traces to find out how "
    "far the ice once reached. In the northern Alps it covered places where cities stand today, and boulders of "
    "granite lie in fields a hundred kilometres from the nearest granite mountain.\n",
    "Question: A water tank holds 240 litres. A pump fills it at 8 litres per minute, while a leak loses 2 litres per "
    "minute. The tank is already one quarter full. How long does it take until it is full?\n"
    "Answer: One quarter of 240 litres is 60 litres, so 240 - 60 = 180 litres are missing. The pump adds 8 litres in "
    "each minute and the leak takes 2 away, so the tank gains 8 - 2 = 6 litres per minute. 180 / 6 = 30, so it takes "
    "30 minutes.\n\n"
    "Question: Why does bread dough rise?\n"
    "Answer: Yeast is a living organism that feeds on the sugars in flour. As it feeds, it gives off carbon dioxide. "
    "The gas is trapped by the network of gluten that forms when the dough is kneaded, so the dough grows. In the oven "
    "the gas expands once more, the yeast dies, and the structure sets.\n\n"
    "Question: Which of these is not a mammal: a bat, a dolphin, a penguin or a hedgehog?\n"
    "Answer: The penguin. It is a bird: it has feathers and lays eggs. Bats, dolphins and hedgehogs are mammals, which "
    "feed their young with milk.\n",
    "import csv\nfrom collections import defaultdict\n\n\n"
    'def average_by_city(path):\n    """Return the mean temperature of each city in a CSV file."""\n'
    "    total = defaultdict(float)\n    count = defaultdict(int)\n"
    "    with open(path, newline='') as file:\n        for row in csv.DictReader(file):\n"
    "            if not row['temperature']:\n                continue\n"
    "            total[row['city']] += float(row['temperature'])\n            count[row['city']] += 1\n"
    "    return {city: total[city] / count[city] for city in total}\n\n\n"
    "if __name__ == '__main__':\n    for city, mean in sorted(average_by_city('weather.csv').items()):\n"
    "        print(f'{city}: {mean:.1f}')\n\n"
    "CREATE TABLE orders (id INTEGER PRIMARY KEY, customer_id INTEGER, total REAL, created_at TEXT);\n"
    "SELECT customer_id, COUNT(*), SUM(total) FROM orders WHERE created_at >= '2024-01-01' GROUP BY customer_id "
    "ORDER BY SUM(total) DESC LIMIT 10;\n",
    "Dear Ms Okafor,\n\nThank you for your message of 4 May about the delayed delivery. I am sorry that the desk did "
    "not arrive on the day we had agreed. The carrier tells us that the parcel was sent to the wrong depot and will "
    "reach you on Thursday between 9 a.m. and 1 p.m. You do not have to pay the delivery charge, and we have refunded "
    "it to your card. If Thursday does not suit you, please call us before noon tomorrow and we will find another "
    "date.\n\nKind regards,\nTomas Lindqvist\nCustomer Service\n\n"
    "Leo: are you still coming on saturday?\nMaya: yes! what time should I be there?\n"
    "Leo: around five, we want to light the fire before it gets dark\nMaya: great. should I bring something to eat?\n"
    "Leo: maybe a salad? we already have far too much bread\nMaya: potato salad it is :)\n",
    "The council voted on Tuesday to close the old bridge to cars from next spring. Engineers had found cracks in two "
    "of its five piers last autumn, and since then lorries have had to take the road through the village of Harrow "
    "End, where residents complain of noise and dust. The repair will cost an estimated 3.2 million pounds and take "
    "fourteen months. Pedestrians and cyclists will be able to cross during the work.\n\n"
    "Shop owners on the eastern side fear that they will lose customers. \"Half of the people who come in here drive,\""
    " said Margaret Hill, who has run the bakery at the foot of the bridge for thirty years. The mayor promised a free "
    "bus every fifteen minutes and said that a new bridge, which some councillors had asked for, would have cost "
    "seven times as much. Two members of the opposition voted against the plan, and one abstained.\n",
)  # fmt: skip


def texts_for(precision: str, tokenizer: Tokenizer, spec: DecoderSpec, slow: bool = False) -> dict[str, list[TokenRow]]:
    """The text whose perplexity says what `precision` and the cache's type cost, by its name in the manifest; none
    where they cost nothing. `slow` as for `text_rows`.
    """
    return {} if precision == "fp32" and spec.cache_dtype == DTYPES[0] else {TEXT: text_rows(tokenizer, spec, slow)}


def text_rows(tokenizer: Tokenizer, spec: DecoderSpec, slow: bool = False) -> list[TokenRow]:
    """Cuts every passage to its share of as many tokens as the model's size allows. `slow`: a graph that runs few rows
    at a time, for which it is the least.
    """
    parameters = spec.layers * sum(out * into for out, into in spec.widths.values()) + spec.vocab * spec.hidden
    tokens = LEAST if slow else min(TOKENS, max(LEAST, int(WORK / parameters)))
    max_tokens = min(tokens // len(PASSAGES), spec.context_length - 1)
    rows = []
    for passage in PASSAGES:
        ids = [token % spec.vocab for token in tokenizer.encode(passage).ids[:max_tokens]]
        rows.append(TokenRow(ids, [False] + [True] * (len(ids) - 1)))
    return [row for row in rows if len(row.input_ids) > 1]
