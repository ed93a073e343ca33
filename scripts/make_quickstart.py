"""Make the quickstart's tokenizer, tiny random Llama and preference pairs: offline, always the same bytes.

A traveller asks how to reach a goal in some town. In half of the pairs the rejected answer says the right
thing in a dismissive tone (`tone`); in the other half it is courteous but about another goal in that town
(`topic`), which only a model that looks back at the question can notice. Length says nothing: both answers
draw it from the same range.
"""

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, logging

NUM_TRAIN_PAIRS = 4000
NUM_HELDOUT_PAIRS = 150  # of each kind
KINDS = ("tone", "topic")
VOCAB_SIZE = 1024
SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# A town is a beginning and an ending. The held-out pairs are about towns that training never names.
TOWN_BEGINNINGS = (
    "Ash Beck Birch Black Brook Clay Cold Copper Deer East Elder Elm Fair Fox Frost Glen Gold Green Hart "
    "Hazel High Iron Kings Lake Lark Long Maple Marsh Mill Moor North Oak Old Otter Pine Queens Raven Red "
    "Rock Rose Salt Silver South Stone Summer Swan Thorn West White Willow Winter Wolf"
)
TOWN_ENDINGS = (
    "bank borough bridge burn bury cliff cote dale fell field ford gate grove ham haven hill hurst ley mere "
    "mouth point port ridge shaw side stead thorpe ton vale view ville water well wick wood worth"
)
ADVICE = {  # goal -> what helps to reach it
    "get to {town}": (
        "take the morning train to {town}", "change to the bus at the mill", "buy your ticket a day ahead",
        "follow the river road as far as {town}", "ask the driver to stop at the {town} bridge",
    ),
    "eat well in {town}": (
        "try the soup at the {town} inn", "book a table by the window", "order the fish of the day",
        "go to the {town} market before noon", "leave room for the famous {town} cake",
    ),
    "find a room in {town}": (
        "write to the {town} guest house", "look for a quiet street", "see if breakfast is in the price",
        "call the {town} tourist office", "avoid the week of the {town} fair",
    ),
    "spend a day in {town}": (
        "start at the {town} museum", "climb the tower for the view", "rest in the garden at noon",
        "walk along the old wall of {town}", "visit the {town} castle at sunset",
    ),
    "buy a gift in {town}": (
        "go to the glass shop behind {town} church", "bring some cash", "choose a scarf of local wool",
        "compare what the {town} potters sell", "let the shop wrap it in {town} paper",
    ),
    "hike around {town}": (
        "pick up a map at {town} station", "wear boots with a good sole", "fill your bottle at the spring",
        "take the forest path north of {town}", "turn back to {town} before dark",
    ),
}  # fmt: skip
QUESTIONS = (
    "How do I {goal}?", "What is the best way to {goal}?", "Can you tell me how to {goal}?",
    "I would like to {goal}. Where do I start?", "My friend wants to {goal}. What should I say?",
)  # fmt: skip
SYSTEM_MESSAGES = ("You are a helpful assistant.", "Answer the question of the user in a few sentences.")
SMALL_TALK = (("Hello!", "Hello, what can I do for you?"), ("Are you there?", "I am here. What do you need?"))

TONES = {  # two parts of an opening, two of a closing; the tones share words, so that no single word decides
    "courteous": (
        ("Of course.", "Gladly!", "Good question.", "Sure, let us look.", "Thanks for asking.", "Why not?"),
        ("I am happy to help you.", "It is easier than it looks.", "You are not the first to ask.", ""),
        ("Take your time", "You can not go wrong", "It gets easier each time", "Do not rush"),
        ("and ask me again if you need to.", "and tell me how it goes.", "and thank you for your trust."),
    ),
    "dismissive": (
        ("Not again.", "Really?", "Silly question.", "Sure, if I must.", "Stop asking.", "Why me?"),
        ("I am tired of helping you.", "It is easy, just look.", "You never think first.", ""),
        ("Do not waste my time", "You will get it wrong", "I told you a hundred times", "Have it your way"),
        ("and look it up next time.", "and leave me out of it.", "and do not blame me if you get lost."),
    ),
}
ANSWER_WORDS = range(24, 46)  # answers of both tones often have these lengths


def towns(*, heldout: bool) -> list[str]:
    """The held-out fifth of all towns, or the others."""
    names = [beginning + ending for beginning in TOWN_BEGINNINGS.split() for ending in TOWN_ENDINGS.split()]
    random.Random(0).shuffle(names)
    num_heldout = len(names) // 5
    return names[:num_heldout] if heldout else names[num_heldout:]


def fill(template: str, goal: str, town: str) -> str:
    return template.format(goal=goal.format(town=town), town=town)


def prompt(rng: random.Random, goal: str, town: str) -> list[dict[str, str]]:
    """A conversation that ends with a question; some begin with a system message or with small talk."""
    messages = [{"role": "system", "content": rng.choice(SYSTEM_MESSAGES)}] if rng.random() < 0.3 else []
    if rng.random() < 0.3:
        greeting, reply = rng.choice(SMALL_TALK)
        messages += [{"role": "user", "content": greeting}, {"role": "assistant", "content": reply}]
    return [*messages, {"role": "user", "content": fill(rng.choice(QUESTIONS), goal, town)}]


def answer(rng: random.Random, goal: str, town: str, tone: str) -> list[dict[str, str]]:
    """An answer with a number of words that is uniform over ANSWER_WORDS, whatever its goal and tone."""
    num_words = rng.choice(ANSWER_WORDS)
    words: list[str] = []
    while len(words) != num_words:
        *opening, closing, wish = map(rng.choice, TONES[tone])
        first, *others = rng.sample(ADVICE[goal], rng.randint(1, 3))
        steps = [f"{rng.choice(('Then', 'Next', 'After that'))} {advice}." for advice in others]
        sentences = [*opening, f"To {{goal}}, {first}.", *steps, closing, wish]
        words = fill(" ".join(sentences), goal, town).split()
    return [{"role": "assistant", "content": " ".join(words)}]


def pair(rng: random.Random, town: str, kind: str) -> dict[str, Any]:
    """One row of the `conversational` format; `kind` says in what the rejected answer is worse."""
    asked, other = rng.sample(list(ADVICE), 2)
    goal, tone = {"tone": (asked, "dismissive"), "topic": (other, "courteous")}[kind]
    return {
        "kind": kind,
        "prompt": prompt(rng, asked, town),
        "chosen": answer(rng, asked, town, "courteous"),
        "rejected": answer(rng, goal, town, tone),
    }


def make_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE: it splits as `texts` suggest, and encodes any other text too."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, model_max_length=512, **special)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama of half a million parameters that has learned nothing."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
        initializer_range=128**-0.5,  # hidden_size ** -0.5; Llama's 0.02 is meant for wider models
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def make_quickstart(directory: Path) -> None:
    """Writes model/ (tokenizer included), heldout_tone.jsonl, heldout_topic.jsonl and, last, train.jsonl."""
    rng = random.Random(0)
    known, unknown = towns(heldout=False), towns(heldout=True)
    train = [pair(rng, rng.choice(known), KINDS[number % len(KINDS)]) for number in range(NUM_TRAIN_PAIRS)]
    messages = [message for row in train for message in row["prompt"] + row["chosen"] + row["rejected"]]
    tokenizer = make_tokenizer(message["content"] for message in messages)
    tokenizer.save_pretrained(directory / "model")
    make_model(tokenizer).save_pretrained(directory / "model")
    for kind in KINDS:
        heldout = [pair(rng, rng.choice(unknown), kind) for _ in range(NUM_HELDOUT_PAIRS)]
        write_pairs(directory / f"heldout_{kind}.jsonl", heldout)
    write_pairs(directory / "train.jsonl", train)


def write_pairs(path: Path, pairs: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in pairs), encoding="utf-8")


if __name__ == "__main__":
    logging.disable_progress_bar()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path, nargs="?", default=Path("runs/quickstart/assets"))
    make_quickstart(parser.parse_args().directory)
