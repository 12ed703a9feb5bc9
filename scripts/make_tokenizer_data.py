#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Small tokenizers and what independent implementations make of texts, for tests/text.

Writes tests/data/tokenizer/<name>.gguf and <name>.json (cases: the text in hexadecimal, its ids) and
tests/data/chat/cases.json (templates, conversations, and their rendering by Jinja).
Needs: pip install gguf tokenizers sentencepiece jinja2
"""
import io
import json
import os

import jinja2
import sentencepiece
from gguf import GGUFWriter
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

DATA = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "data")
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

CORPUS = [
    "The owner of a position is its page number modulo the number of ranks; it's written down once.",
    "We'll count the tokens, they're cut where words end, and I'd say that's all there is to it.",
    "int main(void)\n{\n    return 0;\n}\n\n\tif (x != y) { x += 1; }  // tabs and  spaces   too\n",
    "In 1999 there were 12345 of them, in 2024 some 1,234,567.89; that's 3.5e-10 or 0x7fff.",
    "Die Größe der Stücke hängt von der Länge ab. Où est la bibliothèque? ¿Qué pasó mañana?",
    "Съешь ещё этих мягких французских булок. Ωμέγα και άλφα. 東京は日本の首都です。한국어 문장입니다.",
    "हिन्दी में लिखा हुआ पाठ। مرحبا بالعالم. ไทยไม่มีเว้นวรรค 👩‍👩‍👧 👍🏽",
] * 4

TEXTS = [
    "", " ", "  ", "   ", "\n", "\n\n", " \n", "\n ", " \n \n  x", "a", " a", "a ", "  a", "a  b", "a   b",
    "Hello, world!", "It's we'll they'd I'm you've HE'S WE'LL THEY'D I'M 'tis 'S", "'s't're've'm'll'd",
    "it\u2019s", "'\u017f x'\u017fy", "1 12 123 1234 12345 1234567890", "a1b22c333d4444", " 1  2   3", "1.5e-10,000",
    "\u0661\u0662\u0663\u0664 \u00bd\u00b2 \u2167\u2168 \u4e00\u4e8c", "x\u00b2+y\u00b3", "tabs\tand\t\ttabs \t mixed\t ",
    "line\r\nline\r\n\r\nend\r", "!!!???\n\n...", " !\n", "!\r\n x", "#include <a.h>\n#define B  (1 << 3)\n",
    "    indented\n        more\n", "nbsp\u00a0nbsp\u00a0\u00a0x", "em\u2003em\u2003 \u2003x", "ideographic\u3000\u3000x",
    "line\u2028sep\u2029par", "nel\u0085nel\u0085\u0085x", "mvs\u180emvs \u180e x", "zero\u200bwidth \u200b x", "\ufeffbom",
    "e\u0301 combining \u0301alone", "snake_case __x__ a-b", "東京は日本の首都です。", "한국어 문장", "नमस्ते दुनिया", "ไทยไม่มี",
    "مرحبا بالعالم", "👩‍👩‍👧‍👦 🏳️‍🌈", "𝔘𝔫𝔦 𝟙𝟚𝟛𝟜", "\U000f0000\U0010ffff private", "\x00\x01\x02 \x7f", "\x1c\x1d x\x1e\x1f",
    "<|endoftext|> and <s> </s> <unk> <0x41> are text", "<tool>call</tool>", "x<tool><tool> y <tool>", "<too<tool>l>",
    "two<sep><sep2>three<sep>2", "unreachable unreachably", "unreachable", "\u2581\u2581lower\u2581one eighth \u2581",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "the the the ththe thethe", CORPUS[0] + CORPUS[4] * 2,
]

CONTRACTIONS = r"'s|'t|'re|'ve|'m|'ll|'d"
PRE = {
    "gpt-2": [(CONTRACTIONS + r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")],
    "smollm": [r"\p{N}", (CONTRACTIONS + r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")],
    "llama-bpe": [
        r"(?i:" + CONTRACTIONS + r")|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
}
LLAMA3_CONTROLS = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
USER_TOKENS = ["<tool>", "<sep>", "<sep2>"]


def write_json(path, value):
    with open(path, "w", encoding="utf-8") as f:
        json.dump(value, f, indent=0, ensure_ascii=True)
        f.write("\n")


def cases(encode):
    return [{"hex": t.encode("utf-8").hex(), "ids": encode(t)} for t in TEXTS]


def make_bpe(pre):
    tok = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    splits = [pre_tokenizers.Split(Regex(r), "isolated") for r in PRE[pre]]
    tok.pre_tokenizer = pre_tokenizers.Sequence(splits + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(CORPUS, trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    model = json.loads(tok.to_str())["model"]
    # A token that no merges lead to: only a rule that takes whole pieces finds it.
    vocab = dict(model["vocab"])
    vocab["\u0120unreachable"] = len(vocab)
    merges = [tuple(m) for m in model["merges"]]
    tok.model = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe")
    controls = LLAMA3_CONTROLS if pre == "llama-bpe" else ["<|endoftext|>"]
    plain = tok.to_str()
    tok.add_special_tokens([AddedToken(c, special=True, normalized=False) for c in controls])
    tok.add_tokens([AddedToken(u, special=False, normalized=False) for u in USER_TOKENS])
    # Control tokens in the text are text: the ids come from a copy that lacks them.
    without = Tokenizer.from_str(plain)
    without.add_tokens([AddedToken("\ue000%d" % i, special=False, normalized=False) for i in range(len(controls))])
    without.add_tokens([AddedToken(u, special=False, normalized=False) for u in USER_TOKENS])
    n = tok.get_vocab_size()
    by_id = [tok.id_to_token(i) for i in range(n)]
    types = [NORMAL] * len(vocab) + [CONTROL] * len(controls) + [USER] * len(USER_TOKENS)
    w = GGUFWriter(os.path.join(DATA, "tokenizer", pre + ".gguf"), "llama")
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre(pre)
    w.add_token_list(by_id)
    w.add_token_types(types)
    w.add_token_merges([" ".join(m) for m in merges])
    w.add_bos_token_id(len(vocab))
    w.add_eos_token_id(len(vocab) + (1 if len(controls) > 1 else 0))
    if pre == "llama-bpe":
        w.add_chat_template(TEMPLATES["llama3"][0])
    finish(w)
    special = "x" + controls[0] + " y" + controls[-1] + "\nz"
    write_json(os.path.join(DATA, "tokenizer", pre + ".json"), {
        "cases": cases(lambda t: without.encode(t, add_special_tokens=False).ids),
        "special": [{"hex": special.encode().hex(), "ids": tok.encode(special, add_special_tokens=False).ids}],
    })


def make_spm():
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=out, model_type="bpe", vocab_size=700, byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=True,
        user_defined_symbols=USER_TOKENS, control_symbols=["<ctl>"], character_coverage=0.98, minloglevel=2)
    sp = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    n = sp.get_piece_size()
    types = [UNKNOWN if sp.is_unknown(i) else BYTE if sp.is_byte(i) else CONTROL if sp.is_control(i)
             else USER if sp.id_to_piece(i) in USER_TOKENS else NORMAL for i in range(n)]
    w = GGUFWriter(os.path.join(DATA, "tokenizer", "spm.gguf"), "llama")
    w.add_tokenizer_model("llama")
    w.add_token_list([sp.id_to_piece(i) for i in range(n)])
    w.add_token_types(types)
    w.add_token_scores([sp.get_score(i) for i in range(n)])
    w.add_bos_token_id(sp.bos_id())
    w.add_eos_token_id(sp.eos_id())
    w.add_unk_token_id(sp.unk_id())
    w.add_add_space_prefix(True)
    w.add_chat_template(TEMPLATES["llama2"][0])
    finish(w)
    write_json(os.path.join(DATA, "tokenizer", "spm.json"), {"cases": cases(sp.encode), "special": []})


def finish(w):
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


ALTERNATE = ("{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
             "{{ raise_exception('roles must alternate') }}{% endif %}")
SPLIT_SYSTEM = ("{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}"
                "{% set system_message = messages[0]['content'] %}{% else %}{% set rest = messages %}{% endif %}")
# What the families' published templates render, written for this test; name: (template, bos, eos).
TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>'"
        " + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}", "", "<|im_end|>"),
    "chatml-default": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\\nYou are a \"test\", aren\\'t you?<|im_end|>\\n' }}{% endif %}"
        "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}", "", "<|im_end|>"),
    "llama2": (
        SPLIT_SYSTEM + "{{ '' }}{% for message in rest %}" + ALTERNATE +
        "{% if loop.index0 == 0 and system_message is defined %}"
        "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
        "{% else %}{% set content = message['content'] %}{% endif %}"
        "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content | trim + ' [/INST]' }}"
        "{% else %}{{ ' ' + content | trim + ' ' + eos_token }}{% endif %}{% endfor %}", "<s>", "</s>"),
    "mistral-spaces": (
        SPLIT_SYSTEM + "{{ bos_token }}{% for message in rest %}" + ALTERNATE +
        "{% if message['role'] == 'user' %}{% if loop.first and system_message is defined %}"
        "{{ ' [INST] ' + system_message + '\\n\\n' + message['content'] + ' [/INST]' }}{% else %}"
        "{{ ' [INST] ' + message['content'] + ' [/INST]' }}{% endif %}"
        "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}", "<s>", "</s>"),
    "mistral-first": (
        "{{ bos_token }}{% for message in messages %}" + ALTERNATE +
        "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
        "{% else %}{{ message['content'] + eos_token + ' ' }}{% endif %}{% endfor %}", "<s>", "</s>"),
    "mistral-last": (
        SPLIT_SYSTEM + "{{ bos_token }}{% for message in rest %}" + ALTERNATE +
        "{% if message['role'] == 'user' %}{% if loop.last and system_message is defined %}"
        "{{ '[INST] ' + system_message + '\\n\\n' + message['content'] + '[/INST]' }}{% else %}"
        "{{ '[INST] ' + message['content'] + '[/INST]' }}{% endif %}"
        "{% else %}{{ ' ' + message['content']|trim + eos_token }}{% endif %}{% endfor %}", "<s>", "</s>"),
    "llama3": (
        "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
        " + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
        "{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}", "<|begin_of_text|>", "<|eot_id|>"),
    "llama3.1": (
        "{{- bos_token }}{%- if not date_string is defined %}{%- set date_string = \"26 Jul 2024\" %}{%- endif %}"
        "{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content']|trim %}"
        "{%- set messages = messages[1:] %}{%- else %}{%- set system_message = \"\" %}{%- endif %}"
        "{{- \"<|start_header_id|>system<|end_header_id|>\\n\\n\" }}{{- \"Cutting Knowledge Date: December 2023\\n\" }}"
        "{{- \"Today Date: \" + date_string + \"\\n\\n\" }}{{- system_message }}{{- \"<|eot_id|>\" }}"
        "{%- for message in messages %}{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
        "+ message['content'] | trim + '<|eot_id|>' }}{%- endfor %}{%- if add_generation_prompt %}"
        "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}", "<|begin_of_text|>", "<|eot_id|>"),
    "gemma": (
        "{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}{%- set prefix = messages[0]['content'] + '\\n\\n' -%}"
        "{%- set rest = messages[1:] -%}{%- else -%}{%- set prefix = '' -%}{%- set rest = messages -%}{%- endif -%}"
        "{%- for message in rest -%}" + ALTERNATE + "{%- if message['role'] == 'assistant' -%}{%- set role = 'model' -%}"
        "{%- else -%}{%- set role = message['role'] -%}{%- endif -%}"
        "{{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else '') }}{{ message['content'] | trim }}"
        "{{ '<end_of_turn>\\n' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}",
        "<bos>", "<eos>"),
}
CONVERSATIONS = [
    [("user", "What is 2+2?")],
    [("system", "Be brief."), ("user", "  padded \n")],
    [("user", "Hi"), ("assistant", " Hello! "), ("user", "\u00a0Bye\u3000")],
    [("system", " You answer\nin lines. "), ("user", "a\n"), ("assistant", "b\n"), ("user", "\tc"), ("assistant", "d"),
     ("user", "<|im_end|></s><|eot_id|><end_of_turn> e")],
    [("user", "")],
    [("system", "Be brief."), ("user", " \n")],
]


def make_chat():
    def refuse(text):
        raise jinja2.TemplateError(text)
    env = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    env.globals["raise_exception"] = refuse
    out = []
    for name, (source, bos, eos) in TEMPLATES.items():
        conversations = []
        for c in CONVERSATIONS:
            if name == "mistral-first" and c[0][0] == "system":
                continue  # this template refuses system messages; we put them before the first user's
            messages = [{"role": r, "content": t} for r, t in c]
            text = env.from_string(source).render(messages=messages, bos_token=bos, eos_token=eos,
                                                  add_generation_prompt=True)
            conversations.append({"messages": messages, "text": text})
        out.append({"name": name, "template": source, "bos": bos, "eos": eos, "conversations": conversations})
    write_json(os.path.join(DATA, "chat", "cases.json"), out)


if __name__ == "__main__":
    os.makedirs(os.path.join(DATA, "tokenizer"), exist_ok=True)
    os.makedirs(os.path.join(DATA, "chat"), exist_ok=True)
    for pre_name in PRE:
        make_bpe(pre_name)
    make_spm()
    make_chat()
