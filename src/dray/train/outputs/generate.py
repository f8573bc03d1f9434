"""Let a saved model generate text."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from dray.contract.findings import ConfigError, counted
from dray.contract.trainer.image_tasks import Generate
from dray.train import errors, objectives
from dray.train.checkpoint import manifest

_TOKENS = 64  # by default


def run(job: Generate) -> None:
    """Print the prompt and its continuation; for a conversation only the answer."""
    manifest.check_model(Path(job.model))
    with _reading(job):
        config = AutoConfig.from_pretrained(job.model, trust_remote_code=job.trust_remote_code)
        tokenizer: Any = AutoTokenizer.from_pretrained(job.model, trust_remote_code=job.trust_remote_code)
    architectures = config.architectures or []
    if not any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures):
        raise ConfigError(
            "this model does not generate text",
            wanted="a causal language model",
            found=f"{', '.join(architectures) or 'no architecture'} in {job.model}",
            fix="train a model with train.objective = causal",
        )
    with _reading(job):
        network: Any = AutoModelForCausalLM.from_pretrained(
            job.model,
            trust_remote_code=job.trust_remote_code,
            use_safetensors=True,
            device_map="auto" if job.device_map else None,
        ).eval()
    if job.device_map:
        require_in_memory(network)
    elif torch.cuda.is_available():
        network.to("cuda")
    print(_text(job, network, tokenizer), flush=True)


def require_in_memory(network: Any) -> None:  # noqa: ANN401  a transformers model
    """Print how many modules `device_map = "auto"` has put on each device, and refuse the disk: it is slow."""
    device_map = getattr(network, "hf_device_map", {"": network.device})  # transformers sets none for one device
    devices = Counter(map(str, device_map.values()))
    text = ", ".join(f"{name}: {counted(count, 'module')}" for name, count in devices.items())
    if "disk" in devices:
        raise ConfigError(
            "the model does not fit into the memory of this machine",
            wanted="all layers on its GPUs and in its host memory",
            found=text,
            fix="use a machine with more memory or GPUs",
        )
    print(f"device_map: {text}", flush=True)


def _reading(job: Generate) -> AbstractContextManager[None]:
    wanted, fix = "files that transformers reads, with weights as safetensors", "export it again: dray model export RUN"
    return errors.refusing("the model cannot be read", where=job.model, wanted=wanted, fix=fix)


def _text(job: Generate, network: Any, tokenizer: Any) -> str:  # noqa: ANN401
    chat = objectives.named(job.objective).conversations
    if chat:
        with errors.refusing(
            "the chat template refuses the prompt",
            where=job.model,
            wanted="a template that accepts one message of role user",
            fix="train with another model.tokenizer",
        ):
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": job.prompt}], tokenize=False, add_generation_prompt=True
            )
        prompt = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    else:
        prompt = tokenizer(job.prompt or tokenizer.eos_token, return_tensors="pt").input_ids
    length = prompt.shape[1]
    room = (getattr(network.config, "max_position_embeddings", None) or 1 << 30) - length
    tokens = job.tokens or max(1, min(_TOKENS, room))
    if tokens > room:
        raise ConfigError(
            "the prompt and the new tokens are longer than the model's max_position_embeddings",
            wanted=f"at most {length + room} tokens",
            found=f"{length} tokens in the prompt, and {tokens} new ones",
            fix=f"--tokens {room}, or a shorter prompt" if room > 0 else "a shorter prompt",
        )
    torch.manual_seed(job.seed)
    sampling = {"do_sample": True, "temperature": job.temperature} if job.temperature else {"do_sample": False}
    prompt = prompt.to(network.device)
    written = network.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=tokens,
        pad_token_id=tokenizer.eos_token_id,
        **sampling,
    )
    return str(tokenizer.decode(written[0, length if chat else 0 :], skip_special_tokens=True))
