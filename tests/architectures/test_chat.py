"""Chat templates and tokenizer folders: the strings, ids and special tokens are transformers', feature by feature."""

import json

import pytest
import tokenizers

from llmstack.architectures.zoo import Tokenizer, tokenizer_from_folder

TALK = [
    {"role": "system", "content": "Be <b>brief</b> & kind."},
    {"role": "user", "content": "Grüße, “you”\n  there  "},
    {"role": "assistant", "content": "Hello!", "reasoning": "a greeting"},
    {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1.5}}}], "content": None},
    {"role": "user", "content": "And?"},
]
TOOL = {"type": "function", "function": {"name": "add", "description": "a + b — sum", "parameters": {"b": 1, "a": 2}}}
EACH = "{% for m in messages %}\n"
EACH += "  {% if m.content is defined %}<{{ m.role }}>{{ m.content }}\n  {%- endif %}\n{% endfor %}"
TEMPLATES = {
    "plain": EACH + "{% if add_generation_prompt %}<assistant>{% endif %}",
    "tools none": "{% if tools is none %}-{% endif %}"
    "{% if tools is defined %}d{% endif %}{% if not tools %}n{% endif %}",
    "tools not none": "{% if tools is not none %}You may call: {{ tools | tojson }}{% endif %}",
    "documents": "{{ documents is none }} {{ documents }}",
    "date": "{{ strftime_now('%d %B %Y') }}{% if strftime_now is defined %} now{% else %} 26 Jul 2024{% endif %}",
    "generation": "{% for m in messages %}["
    "{% generation %}{{ m.content }}{% set x = 1 %}\n{% endgeneration %}]{{ x }}{% endfor %}",
    "generation, trimmed": "{% for m in messages %} {%- generation -%} {{ m.role }} {%- endgeneration -%} {% endfor %}",
    "names": "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ pad_token }}|{{ sep_token }}|{{ mask_token }}|"
    "{{ image_token }}|{{ audio_token }}|{{ video_token is defined }}|{{ add_bos_token }}",
    "tojson": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ tools | tojson }}"
    "{{ messages[1] | tojson(true, 1, [',', ':'], true) }}",
    "sorted": "{{ messages[2] | tojson(sort_keys=True, separators=(', ', '=')) }}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}/{{ m.thinking }}/{{ m.reasoning }};{% endfor %}",
    "empty fields": "{% for m in messages %}{{ 'content' in m }}{{ m.content is none }}{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.role }}"
    "{% if m.role == 'assistant' %}{% break %}{% endif %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
    "{{ dict(a=1) | tojson }}",
    "macro": "{% macro show(m) %}{{ bos_token }}{{ m.role }}{{ strftime_now('%Y') }}{% endmacro %}"
    "{{ show(messages[0]) }}",
    "white": "  {% if true %}\n    x\n  {% endif %}\n{{ messages[0].content | trim }}\n\n",
    "variable": "{% if enable_thinking is defined and not enable_thinking %}quiet{% endif %}",
}
VOCABULARY = ["<s>", "</s>", "<unk>", "<pad>", "<img>", "<eot>", "<snd>", "hi", "there", "<user>", "<assistant>"]


@pytest.fixture
def folder(tmp_path):
    vocabulary = {token: i for i, token in enumerate(VOCABULARY)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens([t for t in VOCABULARY if t.startswith("<")])
    template = tokenizers.processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 0)])
    inner.post_processor = template
    inner.save(str(tmp_path / "tokenizer.json"))
    told = dict(tokenizer_class="PreTrainedTokenizerFast", bos_token="<s>", unk_token="<unk>", add_bos_token=True)
    told |= dict(eos_token={"content": "</s>", "__type": "AddedToken", "lstrip": False, "rstrip": False})
    told |= dict(pad_token="<pad>", image_token="<img>", extra_special_tokens={"audio_token": "<snd>"})
    write(tmp_path, "tokenizer_config.json", told)
    return tmp_path


def write(folder, name, content):
    (folder / name).write_text(json.dumps(content))


def theirs(folder):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_writes_what_it_writes_for_transformers(folder, name):
    (folder / "chat_template.jinja").write_text(TEMPLATES[name])
    ours, peer = tokenizer_from_folder(folder), theirs(folder)
    given = dict(enable_thinking=False) if name == "variable" else {}
    for tools in (None, [TOOL], []):
        for prompt in (True, False):
            want = peer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=prompt, tools=tools, **given)
            assert ours.apply_chat_template(TALK, add_generation_prompt=prompt, tools=tools, **given) == want
    documents = [{"title": "t", "text": "x"}]
    want = peer.apply_chat_template(TALK, tokenize=False, documents=documents, **given)
    got = ours.apply_chat_template(TALK, add_generation_prompt=False, documents=documents, **given)
    assert got == want
    assert ours.apply_chat_template(TALK, documents=None, **given) == ours.apply_chat_template(TALK, **given)


def test_a_conversation_s_ids_begin_once(folder):
    """The template writes <s>, and the tokenizer adds one to every text."""
    (folder / "chat_template.jinja").write_text("{{ bos_token }} " + TEMPLATES["plain"])
    ours, talk = tokenizer_from_folder(folder), [{"role": "user", "content": " hi there "}]
    want = theirs(folder).apply_chat_template(talk, add_generation_prompt=True)["input_ids"]
    got = ours.apply_chat_template(talk, tokenize=True)
    assert got == want == [0, 9, 7, 8, 10]
    assert ours.encode(ours.apply_chat_template(talk), special=False) == got
    assert ours.encode("hi") == theirs(folder)("hi").input_ids == [0, 7]


def test_special_tokens_map_counts_in_older_files(folder):
    mapped = {
        "eos_token": "<eot>",
        "pad_token": {"content": "<img>", "lstrip": False, "special": True},
        "sep_token": "<snd>",
    }
    write(folder, "special_tokens_map.json", mapped)
    (folder / "chat_template.jinja").write_text(TEMPLATES["names"])
    for added in ({}, {"added_tokens_decoder": {"0": {"content": "<s>", "special": True}}}):
        told = json.loads((folder / "tokenizer_config.json").read_text()) | added
        write(folder, "tokenizer_config.json", told)
        ours, peer = tokenizer_from_folder(folder), theirs(folder)
        assert (ours.eos, ours.pad, ours.bos) == (peer.eos_token_id, peer.pad_token_id, peer.bos_token_id)
        assert ours.apply_chat_template(TALK) == peer.apply_chat_template(TALK, tokenize=False)
    write(folder, "special_tokens_map.json", {"eos_token": 3})
    write(folder, "tokenizer_config.json", {})
    with pytest.raises(ValueError, match="eos_token = 3 in .*special_tokens_map.json is no text"):
        tokenizer_from_folder(folder)


def test_all_ids_that_end_an_answer(folder):
    """transformers generates by generation_config.json, and where that is silent by config.json."""
    write(folder, "config.json", {"eos_token_id": [5, 1], "bos_token_id": 0})
    assert tokenizer_from_folder(folder).eos_ids == (1, 5)  # the tokenizer's own first
    write(folder, "generation_config.json", {"eos_token_id": [4, 5, 6]})
    got = tokenizer_from_folder(folder)
    assert (got.eos, got.eos_ids) == (1, (1, 4, 5, 6))
    write(folder, "generation_config.json", {"eos_token_id": 6, "pad_token_id": 4})
    assert tokenizer_from_folder(folder).eos_ids == (1, 6)
    write(folder, "tokenizer_config.json", {})
    got = tokenizer_from_folder(folder)
    assert (got.eos_ids, got.bos, got.pad) == ((6,), 0, 4)


def test_several_templates_by_name(folder):
    told = json.loads((folder / "tokenizer_config.json").read_text())
    listed = [
        {"name": "default", "template": "D{{ bos_token }}"},
        {"name": "tool_use", "template": "T{{ tools | tojson }}"},
    ]
    write(folder, "tokenizer_config.json", told | {"chat_template": listed})

    def same():
        for tools in (None, [TOOL]):
            want = theirs(folder).apply_chat_template(TALK, tokenize=False, tools=tools)
            assert tokenizer_from_folder(folder).apply_chat_template(TALK, tools=tools) == want

    same()
    (folder / "chat_template.jinja").write_text("J")
    same()
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text("K{{ tools | length }}")
    same()
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="the chat templates tool_use, and none is called 'default'"):
        tokenizer_from_folder(folder).apply_chat_template(TALK)


@pytest.mark.parametrize(
    "messages, says",
    [
        ([], "a conversation is a list"),
        ("hi", "a conversation is a list"),
        ({"role": "user", "content": "x"}, "a conversation is a list"),
        (["hi"], "a message is .* got 'hi': give it a role"),
        ([[{"role": "user", "content": "x"}]], "give it a role"),
        ([{"content": "x"}], "give it a role"),
        ([{"role": None, "content": "x"}], "give it a role"),
        ([{"role": "user"}], "it says nothing"),
        ([{"role": "user", "content": None}], "it says nothing"),
    ],
    ids=str,
)
def test_messages_that_are_none(messages, says):
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}))
    with pytest.raises(ValueError, match=says):
        Tokenizer(inner, chat_template=TEMPLATES["plain"]).apply_chat_template(messages)


def test_what_a_template_does_not_read_is_refused():
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}))
    tokenizer = Tokenizer(inner, chat_template=TEMPLATES["plain"])
    with pytest.raises(ValueError, match="the chat template reads no 'return_tensors'"):
        tokenizer.apply_chat_template(TALK, return_tensors="pt")
    with pytest.raises(ValueError, match="a tool is a JSON schema .* got <function"):
        tokenizer.apply_chat_template(TALK, tools=[test_messages_that_are_none])
