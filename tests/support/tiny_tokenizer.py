"""A byte-level BPE of 384 tokens, trained in code in a few milliseconds."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY_SIZE = 384
CHAT_TEMPLATE = """\
{%- if tools %}<s>tools
{{ tools | tojson }}</s>
{% endif %}
{%- for message in messages %}
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
{{- raise_exception('unknown role') }}
{%- endif %}
{{- '<s>' + message.role + '\n' + (message.content or '') + '</s>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}
{%- if add_generation_prompt and thinking %}{{ '<think></think>' }}{% endif %}"""

_CORPUS = (
    "\n\nHuman: what is the colour of the sky?\n\nAssistant: The sky is blue: air scatters blue light.",
    "\n\nHuman: how do I bake bread at home?\n\nAssistant: Mix flour, water, salt and yeast; let it rise.",
    "Which of these two answers is better? The first answer is shorter, the second one is more helpful.",
    "user assistant system: please write a short story about the friendly robot and the other robots.",
)


def tiny_tokenizer(chat_template: bool = False) -> PreTrainedTokenizerFast:
    """<pad>, <s> and </s> are tokens 0, 1 and 2; nothing is added around a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=CHAT_TEMPLATE if chat_template else None,
    )
