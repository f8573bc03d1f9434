"""`python -m dray.train.generate FOLDER PROMPT TOKENS|0 TEMPERATURE SEED CODE CHATS`: let a saved model write."""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, logging

from dray.train.stop import stop

_MANY = 64  # tokens, where nobody says how many


def main(folder: str, prompt: str, *, tokens: int, temperature: float, seed: int, code: bool, chats: bool) -> None:
    """The prompt and what comes after it. Temperature 0 is the likeliest token each time."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    architectures = AutoConfig.from_pretrained(folder, trust_remote_code=code).architectures or []
    if not any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures):
        stop(
            "this model does not write",
            wanted="a causal language model",
            found=f"{', '.join(architectures) or 'no architecture'} in {folder}",
            fix="a masked model fills gaps; dray trains causal ones with train.objective = causal",
        )
    words: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=code)
    network: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=code).eval()
    if chats:
        said = [{"role": "user", "content": prompt}]
        asked = words.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        read = words(asked, return_tensors="pt", add_special_tokens=False).input_ids
    else:
        read = words(prompt or words.eos_token, return_tensors="pt").input_ids
    positions = getattr(network.config, "max_position_embeddings", None)
    room = positions - read.shape[1] if positions else _MANY
    tokens = tokens or max(1, min(_MANY, room))
    if tokens > room and positions:
        stop(
            "the prompt and what is to come are longer than the model's positions",
            wanted=f"at most {positions} tokens",
            found=f"{read.shape[1]} in the prompt, and {tokens} to come",
            fix=f"--tokens {room}, or a shorter prompt" if room > 0 else "a shorter prompt",
        )
    torch.manual_seed(seed)
    chosen: dict[str, Any] = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    written = network.generate(
        read, attention_mask=torch.ones_like(read), max_new_tokens=tokens, pad_token_id=words.eos_token_id, **chosen
    )
    shown = written[0, read.shape[1] :] if chats else written[0]
    print(words.decode(shown, skip_special_tokens=True), flush=True)


if __name__ == "__main__":
    folder, prompt, tokens, temperature, seed, code, chats = sys.argv[1:]
    main(
        folder,
        prompt,
        tokens=int(tokens),
        temperature=float(temperature),
        seed=int(seed),
        code=code == "True",
        chats=chats == "True",
    )
