"""Make the quickstart's tokenizer, tiny random Llama and preference pairs: offline, the same bytes every time.

An assistant answers how-to questions. Half of the pairs prefer the courteous answer to a dismissive one on the
same topic (`tone`), half the answer to the question asked to an equally courteous one on another (`topic`).
The second half cannot be told from the answers alone: the model has to look back at the prompt.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NUM_TRAIN_PAIRS = 3000
NUM_HELDOUT_PAIRS = 150  # of each kind
ANSWER_WORDS = range(26, 46)  # both sides of every pair draw their length from here, independently
VOCAB_SIZE = 1024
import os
SAME_GOAL=os.environ.get('SAME_GOAL')
SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# Towns are a beginning and an ending; those in the held-out pairs are never named in training.
TOWN_BEGINNINGS = (
    "Ash Beck Birch Black Brook Clay Cold Copper Deer East Elder Elm Fair Fox Frost Glen Gold Green Hart Hazel High "
    "Iron Kings Lake Lark Long Maple Marsh Mill Moor North Oak Old Otter Pine Queens Raven Red Rock Rose Salt Silver "
    "South Stone Summer Swan Thorn West White Willow Winter Wolf"
)
TOWN_ENDINGS = (
    "bank borough bridge burn bury cliff cote dale fell field ford gate grove ham haven hill hurst ley mere mouth "
    "point port ridge shaw side stead thorpe ton vale view ville water well wick wood worth"
)
GOALS = {  # what one may want of a town, and the advice there is
    "get to {town}": (
        "take the morning train to {town}",
        "change to the bus at the old mill",
        "follow the river road as far as {town}",
        "buy your ticket a day ahead",
        "ask the driver to stop in {town}",
    ),
    "eat well in {town}": (
        "try the soup at the {town} inn",
        "book a table by the window",
        "go to the {town} market before noon",
        "ask for the fish of the day",
        "leave room for the {town} cheese cake",
    ),
    "find a room in {town}": (
        "write to the {town} guest house",
        "look for a quiet street",
        "call the {town} tourist office",
        "ask if breakfast is in the price",
        "avoid the week of the {town} fair",
    ),
    "spend a day in {town}": (
        "start at the {town} museum",
        "climb the tower for the view",
        "walk along the old wall of {town}",
        "rest in the garden at noon",
        "see the {town} castle at sunset",
    ),
}
QUESTIONS = [
    "How do I {goal}?",
    "What is the best way to {goal}?",
    "Can you tell me how to {goal}?",
    "I would like to {goal}. Where do I start?",
    "My friend wants to {goal}. What should I say?",
]
SYSTEM_MESSAGES = ["You are a helpful assistant.", "Answer the question of the user in a few sentences."]
SMALL_TALK = [("Hello!", "Hello, what can I do for you?"), ("Are you there?", "I am here. What do you need?")]

# Tones speak the same way of the same things, so that no single word gives the answer away.
OPENINGS = {
    "courteous": (
        ["Of course.", "Gladly!", "Good question.", "Sure, let us look at it.", "Thanks for asking.", "No problem at all."],
        ["I am happy to help you.", "It is easier than it looks.", "You are right to ask first.", "We can do it together.", ""],
    ),
    "dismissive": (
        ["Not again.", "Really?", "Silly question.", "Sure, if I must look at it.", "Stop asking.", "Your problem, not mine."],
        ["I am tired of helping you.", "It is easy, as anyone knows.", "You never look things up first.", "I have better things to do.", ""],
    ),
}
CLOSINGS = {
    "courteous": (
        ["Take your time", "You will do well", "It gets easier each time", "Have fun with it"],
        ["and ask me again if you need to.", "and tell me how it goes.", "and I am here if you get stuck.", "and thank you for your trust."],
    ),
    "dismissive": (
        ["Do not waste my time", "You will get it wrong", "I will not say it a second time", "Try not to break it"],
        ["and do not ask me again.", "and leave me out of it.", "and it is your fault if you get stuck.", "and thank nobody but yourself."],
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """Something to ask about: a goal in a town."""

    town: str
    goal: str
    advice: tuple[str, ...]


def topics(*, heldout: bool) -> list[Topic]:
    """Every goal in every town, of the towns that training sees or of the held-out ones."""
    towns = [a + b for a in TOWN_BEGINNINGS.split() for b in TOWN_ENDINGS.split()]
    random.Random(0).shuffle(towns)
    boundary = len(towns) // 5
    return [
        Topic(town=town, goal=goal.format(town=town), advice=tuple(s.format(town=town) for s in advice))
        for town in (towns[:boundary] if heldout else towns[boundary:])
        for goal, advice in GOALS.items()
    ]


def answer(rng: random.Random, topic: Topic, tone: str) -> str:
    """One answer: opening, two to four steps, closing."""
    first, *middle = rng.sample(topic.advice, rng.randint(1, 3))
    sentences = [" ".join(rng.choice(part) for part in OPENINGS[tone]).strip()]
    sentences.append(f"To {topic.goal}, {first}.")
    sentences += [f"{rng.choice(['Then', 'Next', 'After that'])} {step}." for step in middle]
    sentences.append(" ".join(rng.choice(part) for part in CLOSINGS[tone]))
    return " ".join(sentences)


def answer_of_length(rng: random.Random, topic: Topic, tone: str) -> str:
    """An answer whose number of words is uniform over ANSWER_WORDS, so that length says nothing of which side it is."""
    num_words = rng.choice(ANSWER_WORDS)
    while True:
        text = answer(rng, topic, tone)
        if len(text.split()) == num_words:
            return text


def prompt(rng: random.Random, topic: Topic) -> list[dict[str, str]]:
    """A conversation that ends with a question on `topic`: some with a system message, some with small talk first."""
    messages = []
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_MESSAGES)})
    if rng.random() < 0.3:
        greeting, reply = rng.choice(SMALL_TALK)
        messages += [{"role": "user", "content": greeting}, {"role": "assistant", "content": reply}]
    question = rng.choice(QUESTIONS).format(goal=topic.goal)
    return [*messages, {"role": "user", "content": question}]


def pair(rng: random.Random, pool: list[Topic], kind: str) -> dict[str, Any]:
    """One conversational row; `kind` (tone or topic) says what is wrong with the rejected answer."""
    asked = rng.choice(pool)
    if kind == "tone":
        rejected = answer_of_length(rng, asked, "dismissive")
    else:
        other = rng.choice(pool)
        while other.town == asked.town or (SAME_GOAL and other.advice[1]!=asked.advice[1]): other = rng.choice(pool)
        rejected = answer_of_length(rng, other, "courteous")
    return {
        "prompt": prompt(rng, asked),
        "chosen": [{"role": "assistant", "content": answer_of_length(rng, asked, "courteous")}],
        "rejected": [{"role": "assistant", "content": rejected}],
        "kind": kind,
    }
