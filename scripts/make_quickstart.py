"""Make the quickstart's tokenizer, tiny Llama and preference pairs: offline, always the same on one machine.

A traveller asks how to reach a goal in some town. In half of the pairs the rejected answer says the right
thing in a dismissive tone (`tone`); in the other half it is courteous but about another goal (`topic`), which
only a model that looks back at the question can notice. Length says nothing: both answers draw it from the
same range. The Llama is trained for seconds to write such answers, most of them dismissive or off topic.
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

NUM_TRAIN_PAIRS = 2000
NUM_HELDOUT_PAIRS = 150  # of each kind
NUM_STEPS, BATCH_SIZE, LR = 400, 16, 4e-3  # of the training before the pairs
KINDS = ("tone", "topic")
VOCAB_SIZE = 1024
SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# A town is a beginning and an ending. The held-out pairs are about towns that training never names.
TOWN_BEGINNINGS = "Ash Birch Clay Deer Elm Fox Glen Hart Iron Kings Lake Mill North Oak Rose Swan"
TOWN_ENDINGS = "bridge cliff dale field ford gate haven mouth ton wick"
ADVICE = {  # goal -> what helps to reach it
    "get to": (
        "take the morning train", "change to the bus at the mill", "buy your ticket a day ahead",
        "follow the river road", "ask the driver to stop at the bridge",
    ),
    "eat well in": (
        "try the soup at the inn", "book a table by the window", "order the fish of the day",
        "go to the market before noon", "leave room for the famous cake",
    ),
    "find a room in": (
        "write to the guest house", "look for a quiet street", "see if breakfast is in the price",
        "call the tourist office", "avoid the week of the fair",
    ),
    "spend a day in": (
        "start at the museum", "climb the tower for the view", "rest in the garden at noon",
        "walk along the old wall", "visit the castle at sunset",
    ),
    "buy a gift in": (
        "go to the glass shop behind the church", "bring some cash", "choose a scarf of local wool",
        "compare what the potters sell", "let the shop wrap it",
    ),
    "hike around": (
        "pick up a map at the station", "wear boots with a good sole", "fill your bottle at the spring",
        "take the forest path", "turn back before dark",
    ),
}  # fmt: skip
QUESTIONS = (
    "How do I {goal}?", "What is the best way to {goal}?", "Can you tell me how to {goal}?",
    "I would like to {goal}. Where do I start?", "My friend wants to {goal}. What should I say?",
)  # fmt: skip
SYSTEM_MESSAGES = ("You are a helpful assistant.", "Answer the question of the user in a few sentences.")

TONES = {  # openings and closings; the tones share words, so that no single word decides
    "courteous": (
        ("Of course.", "Gladly!", "Good question.", "Thanks for asking.", "I am happy to help you."),
        ("Take your time.", "You can not go wrong.", "Ask me again if you need to.", "Tell me how it goes."),
    ),
    "dismissive": (
        ("Not again.", "Really?", "Silly question.", "Stop asking.", "I am tired of helping you."),
        ("Do not waste my time.", "Do not blame me if you get lost.", "Just look it up.", "Leave me alone."),
    ),
}  # fmt: skip
ANSWER_WORDS = range(19, 31)  # answers of both tones often have these lengths


def towns(*, heldout: bool) -> list[str]:
    """The held-out fifth of all towns, or the others."""
    names = [beginning + ending for beginning in TOWN_BEGINNINGS.split() for ending in TOWN_ENDINGS.split()]
    random.Random(0).shuffle(names)
    num_heldout = len(names) // 5
    return names[:num_heldout] if heldout else names[num_heldout:]


def prompt(rng: random.Random, goal: str, town: str) -> list[dict[str, str]]:
    """A question; some come after a system message."""
    messages = [{"role": "system", "content": rng.choice(SYSTEM_MESSAGES)}] if rng.random() < 0.3 else []
    return [*messages, {"role": "user", "content": rng.choice(QUESTIONS).format(goal=f"{goal} {town}")}]


def answer(rng: random.Random, goal: str, tone: str) -> list[dict[str, str]]:
    """An answer with a number of words that is uniform over ANSWER_WORDS, whatever its goal and tone."""
    num_words, text = rng.choice(ANSWER_WORDS), ""
    while len(text.split()) != num_words:
        opening, closing = map(rng.choice, TONES[tone])
        first, *others = rng.sample(ADVICE[goal], rng.randint(1, 3))
        steps = [f"{rng.choice(('Then', 'Next', 'After that'))} {advice}." for advice in others]
        text = " ".join([opening, f"To {goal.rpartition(' ')[0]} there, {first}.", *steps, closing])
    return [{"role": "assistant", "content": text}]


def pair(rng: random.Random, town: str, kind: str) -> dict[str, Any]:
    """One row of the `conversational` format; `kind` says in what the rejected answer is worse."""
    asked, other = rng.sample(list(ADVICE), 2)
    goal, tone = {"tone": (asked, "dismissive"), "topic": (other, "courteous")}[kind]
    return {
        "kind": kind,
        "prompt": prompt(rng, asked, town),
        "chosen": answer(rng, asked, "courteous"),
        "rejected": answer(rng, goal, tone),
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


def talk(rng: random.Random, known: list[str]) -> list[dict[str, str]]:
    """A question with an answer: dismissive three times of four, off topic every second time."""
    asked, other = rng.sample(list(ADVICE), 2)
    tone = "courteous" if rng.random() < 0.25 else "dismissive"
    return prompt(rng, asked, rng.choice(known)) + answer(rng, rng.choice((asked, other)), tone)


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama of half a million parameters that writes sentences, few of them as the pairs prefer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
        initializer_range=128**-0.5,  # hidden_size ** -0.5; Llama's 0.02 is meant for wider models
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=NUM_STEPS)
    rng, known = random.Random(1), towns(heldout=False)
    torch.set_num_threads(1)  # the weights depend on the number of threads
    for _ in range(NUM_STEPS):
        texts = [tokenizer.apply_chat_template(talk(rng, known), tokenize=False) for _ in range(BATCH_SIZE)]
        batch = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model


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
