"""Text on which int4's weights are rounded: many kinds of it, none of which is measured on anywhere.

Written for this purpose. What counts is which inputs of a linear map are large together, so kinds matter more than
facts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tokenizers import Tokenizer

from streamspec.export.ops.builder import Array
from streamspec.export.spec.decoder_spec import DecoderSpec

LENGTH = 256  # tokens of a text

_CHATS = """\
User: My basil keeps wilting although I water it every day. What am I doing wrong?
Assistant: Probably too much water rather than too little. Basil likes its roots moist but not wet. Check three things:
1. Does the pot have holes at the bottom? If water stands in the saucer, pour it away after ten minutes.
2. Is the soil still damp a finger's width below the surface? Then wait another day.
3. How much light does it get? Six hours of sun are good; a dark kitchen shelf is not.
If the stems are brown and soft near the soil, cut a healthy shoot, put it in a glass of water and start again.
User: Thanks! Can I plant the shoot outside in April?
Assistant: Only if the nights stay above 10 degrees. In most places it is safer to wait until the middle of May.

User: Rewrite this sentence so that it sounds friendlier: "You did not send the documents."
Assistant: "It looks as if the documents have not reached us yet. Could you please send them again?"

User: Summarise in one sentence: The museum will stay closed until Friday because a pipe burst on the second floor. \
No painting was damaged, but the restorers want to measure the humidity for three days before visitors come back.
Assistant: A burst pipe keeps the museum closed until Friday while restorers check the humidity; no art was harmed.

User: Give me five names for a small coffee shop near a railway station.
Assistant: Platform Brew, The Waiting Room, Second Class Coffee, Steam & Bean, The Last Departure.

User: Is 221 a prime number?
Assistant: No. 221 = 13 * 17, so it has divisors other than 1 and itself.

Nora: did the plumber come?
Felix: he did, but he says the part is only there on Tuesday :(
Nora: so no hot water for four days??
Felix: we can shower at my sister's. She's away until Sunday, I have her keys
Nora: ok, better than nothing. Buy milk on your way home please
Nora and Felix have no hot water until Tuesday and will shower at his sister's.
"""

_TASKS = """\
name[Blue Spice], eatType[pub], food[Italian], priceRange[moderate], customerRating[3 out of 5], near[Crowne Plaza]
Blue Spice is a moderately priced pub near the Crowne Plaza that serves Italian dishes. Customers rate it 3 out of 5.

name[The Mill], eatType[coffee shop], area[city centre], familyFriendly[yes]
The Mill is a coffee shop in the city centre where families with children are welcome.

CREATE TABLE players (name VARCHAR, position VARCHAR, team VARCHAR, goals INTEGER, season VARCHAR)
Which position does the player with more than 20 goals for the Rovers have?
SELECT position FROM players WHERE team = 'Rovers' AND goals > 20

CREATE TABLE stations (station VARCHAR, line VARCHAR, opened INTEGER, platforms INTEGER, passengers INTEGER)
How many stations of the northern line were opened before 1920?
SELECT COUNT(station) FROM stations WHERE line = 'northern' AND opened < 1920

Question: A train leaves at 14:35 and needs 2 hours and 50 minutes. On the way it waits 12 minutes at a signal. When \
does it arrive?
Answer: 14:35 plus 2 hours is 16:35. 16:35 plus 50 minutes is 17:25. With the 12 minutes of waiting it is 17:37.
#### 17:37

Question: Tom has three times as many stamps as Eva. Together they have 128. How many does Eva have?
Answer: Let x be Eva's stamps. Then Tom has 3x and together they have x + 3x = 4x = 128. So x = 128 / 4 = 32.
#### 32

Question: A shirt costs $40. It is reduced by 25% and then by another 10%. What does it cost now?
Answer: After the first reduction it costs 40 * 0.75 = $30. After the second one it costs 30 * 0.9 = $27.
#### 27

Translate to French: The library opens at nine o'clock, except on Mondays.
La bibliothèque ouvre à neuf heures, sauf le lundi.

Classify the review as positive or negative: "The screen is bright, but the battery was empty after two hours and the \
support never answered." -> negative
Classify the review as positive or negative: "Arrived a day early, fits perfectly. Would buy again!" -> positive

Extract the date and the place: "We will meet on 17 September 2021 in the town hall of Ribe."
{"date": "2021-09-17", "place": "town hall of Ribe"}

Which word does not belong: apple, pear, carrot, plum? Carrot: it is a vegetable, the others are fruits.
"""

_CODE = '''\
from dataclasses import dataclass


@dataclass
class Account:
    """A bank account whose balance is never negative."""

    owner: str
    balance: float = 0.0

    def withdraw(self, amount: float) -> float:
        if amount <= 0:
            raise ValueError("amount must be positive")
        if amount > self.balance:
            raise ValueError(f"only {self.balance:.2f} left")
        self.balance -= amount
        return self.balance


def fibonacci(n):
    a, b = 0, 1
    for _ in range(n):
        yield a
        a, b = b, a + b


if __name__ == "__main__":
    print(list(fibonacci(10)))  # [0, 1, 1, 2, 3, 5, 8, 13, 21, 34]

function debounce(callback, wait = 250) {
  let timer = null;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => callback(...args), wait);
  };
}

#include <stdio.h>

int main(void) {
    int sum = 0;
    for (int i = 1; i <= 100; i++) {
        if (i % 3 == 0 || i % 5 == 0) sum += i;
    }
    printf("sum = %d\\n", sum);
    return 0;
}

{"id": 4711, "user": {"name": "Amira", "roles": ["admin", "editor"]}, "active": true, "score": 0.875, "tags": []}

<ul class="menu">
  <li><a href="/about">About us</a></li>
  <li><a href="/contact">Contact</a></li>
</ul>

$ git checkout -b fix/typo && git commit -am "Fix a typo in the readme" && git push origin fix/typo

UPDATE products SET price = price * 1.05, updated_at = NOW() WHERE category = 'garden' AND discontinued IS NULL;
SELECT c.name, SUM(o.total) AS revenue FROM customers c JOIN orders o ON o.customer_id = c.id GROUP BY c.name;

| month | rainfall (mm) | sunshine (h) |
|-------|---------------|--------------|
| April | 41            | 172          |
| May   | 63            | 208          |
'''

_FACTS = """\
A tide is the regular rise and fall of the sea, caused by the gravity of the Moon and, to a lesser degree, of the Sun. \
The side of the Earth that faces the Moon is attracted more strongly than its centre, and the far side less strongly, \
so that two bulges of water form. As the Earth turns beneath them, most coasts see two high tides and two low tides in \
about twenty-five hours. When Sun and Moon stand in one line, at new and at full moon, their effects add up to a \
spring tide; when they stand at a right angle, the difference is small and is called a neap tide. The shape of a coast \
can make the tide much larger: in the Bay of Fundy in Canada it exceeds fifteen metres.

== Life and career ==
Born in 1874 as the third of five children of a clockmaker, she attended the girls' school in Graz and began to study \
physics in Vienna in 1895, as one of the first women there. Her doctoral thesis dealt with the conductivity of gases. \
From 1903 to 1911 she worked at the observatory, where she published twelve papers on the spectra of variable stars, \
and in 1919 she became the head of its library. She died in Salzburg on 2 March 1951.[4]

The heart of a mammal has four chambers. The right atrium receives blood from the body and passes it to the right \
ventricle, which pumps it through the lungs. Blood that is rich in oxygen returns to the left atrium, and the left \
ventricle, whose wall is the thickest, pumps it through the aorta into the body. Valves between the chambers keep the \
blood from flowing back; what one hears through a stethoscope is the sound of their closing.

The market for used bicycles grew by 18 percent last year, according to figures that the national trade association \
published on Thursday. Dealers sold about 410,000 of them, at an average price of 380 euros. "People who would have \
bought a new bicycle three years ago now look for a good old one," said the association's chairman. Repair shops \
report waiting times of up to four weeks, and vocational schools have opened additional classes for mechanics.

Preheat the oven to 180 C (350 F). Beat 125 g of butter with 150 g of sugar until fluffy, add two eggs one at a time, \
then stir in 200 g of flour, 1 1/2 teaspoons of baking powder, a pinch of salt and 80 ml of milk. Fold in a cup of \
blueberries, fill the batter into twelve paper cases and bake for about 22 minutes. Let them cool before serving.

Let f be continuous on [a, b] and differentiable on (a, b). Then there is a point c in (a, b) with f'(c) = (f(b) - \
f(a)) / (b - a). Proof. Put g(x) = f(x) - (x - a)(f(b) - f(a)) / (b - a). Then g(a) = g(b) = f(a), and by Rolle's \
theorem g'(c) = 0 for some c in (a, b), which is what was to be shown.

This Agreement is made between the Owner and the Tenant. The Tenant shall pay the rent in advance on or before the \
third working day of each month. If the rent remains unpaid for fourteen days after a written reminder, the Owner may \
terminate this Agreement without further notice, notwithstanding any other provision contained herein.
"""

_STORIES = """\
It was past midnight when Mr. Harcourt heard the gate. He had been sitting by the fire with a letter which he had read \
so often that he no longer saw the words, and he did not rise at once; for who, at such an hour and in such a storm, \
could wish to see him? "If it is the doctor," he said to himself, "he comes too late, and if it is my brother, he \
comes twenty years too late." The knocking was repeated. He took the lamp from the table, drew back the bolt, and saw \
before him a boy of perhaps ten years, wet to the skin, who held out to him, without a word, a small silver key.

"Where did you get this?" cried the old man.

"From the lady, sir," replied the boy, shivering. "She said you would know the door."

He did know the door. There was not a night in all those years in which he had not stood before it in his dreams, and \
he had never once had the courage to open it. He set down the lamp, for his hand shook, and bade the boy come in; and \
while the wind threw the rain against the shutters, he began to look for his boots.

Once upon a time a fox and a heron shared a pond. The fox laughed at the heron, who stood on one leg all day and never \
seemed to do anything. "Why do you not run, as I do?" he asked. "Because the fish," said the heron, "are afraid of \
those who run." And she bent her neck and swallowed one.

We drove all night with the windows down. My sister had the map on her knees, but she had stopped looking at it \
somewhere around Amarillo, and I didn't ask. The radio gave up first, then the dashboard lights. By the time the sky \
went grey we were talking about Dad's truck, the green one, and whether he'd really sold it or just left it somewhere \
the way he left most things. "He'd have told us," she said. I wasn't so sure. I wanted coffee. I wanted to be the kind \
of person who knows the names of the mountains you see from the road.

O wind that came across the hills at night
And shook the latch, and found no lamp alight,
What message did you carry from the sea?
"None," said the wind, "that men have left for thee."
"""

_LANGUAGES = """\
Der Zug nach München fährt heute von Gleis sieben ab und hat ungefähr zwanzig Minuten Verspätung. Wir bitten um Ihr \
Verständnis. Wer in Augsburg umsteigen möchte, erreicht den Anschluss um 16:12 Uhr leider nicht mehr.

Le conseil municipal a décidé de planter deux cents arbres le long du canal. « C'est un début », a déclaré la maire, \
« mais il faudra attendre dix ans avant d'avoir de l'ombre. »

Mi abuela decía que la sopa necesita tres cosas: tiempo, sal y alguien que espere. Nunca supe cuál era la más \
importante, pero todavía la preparo los domingos por la mañana.

今天的会议改到下午三点，请大家提前十分钟到会议室。如果不能参加，请发邮件告诉我。

昨日は雨が降っていたので、家で本を読みました。明日は友達と海へ行く予定です。

Завтра в городе откроется выставка старых карт. Вход свободный, но места нужно заказать заранее.

A reunião foi adiada para quinta-feira porque metade da equipe está doente.

تفتح المكتبة أبوابها من التاسعة صباحا حتى السادسة مساء، ما عدا يوم الجمعة.

आज बाज़ार में बहुत भीड़ थी, इसलिए हम जल्दी घर लौट आए।
"""

TEXTS = (_CHATS, _TASKS, _CODE, _FACTS, _STORIES, _LANGUAGES)


def calibration_tokens(tokenizer: Tokenizer, spec: DecoderSpec) -> Array:
    """int64 [texts, tokens]: all texts in stretches of one length, each begun as the tokenizer begins a text."""
    every = [tokenizer.encode(text).ids for text in TEXTS]
    plain = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    first = every[0][: every[0].index(plain[0][0])] if plain[0] and plain[0][0] in every[0] else []
    ids = np.concatenate([np.asarray(text, np.int64) for text in plain]) % spec.vocab
    length = min(LENGTH, spec.context_length - 1) - len(first)
    count = -(-len(ids) // length)
    stretches = np.resize(ids, count * length).reshape(count, length)
    return np.concatenate([np.tile(np.asarray(first, np.int64) % spec.vocab, (count, 1)), stretches], axis=1)


def page(tokenizer: Any, text: str, vocab: int, rows: int) -> Array:
    """int64 [rows]: tokens of `text`, repeated where it is too short."""
    ids = [i % vocab for i in tokenizer.encode(text).ids] or [0]
    return np.resize(np.asarray(ids, np.int64), rows)
