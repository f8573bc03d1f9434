"""Let a saved model generate text."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from dray.contract.findings import ConfigError
from dray.contract.image_tasks import Generate
from dray.train import errors, objectives
from dray.train.checkpoint import manifest
from dray.train.outputs import device_map

_MANY = 64  # tokens, by default


def run(job: Generate) -> None:
    """Print the prompt and its continuation; for a conversation only the answer."""
    manifest.check_model(Path(job.model))
    chat = objectives.named(job.objective).conversations
    with _reading(job):
        settings = AutoConfig.from_pretrained(job.model, trust_remote_code=job.trust_remote_code)
        tokenizer: Any = AutoTokenizer.from_pretrained(job.model, trust_remote_code=job.trust_remote_code)
    architectures = settings.architectures or []
    if not any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures):
        raise ConfigError(
            "this model does not generate text",
            wanted="a causal language model",
            found=f"{', '.join(architectures) or 'no architecture'} in {job.model}",
            fix="train a model with train.objective = causal",
        )
    options = device_map.placed(_shell(job, settings)) if job.device_map else {}
    with _reading(job):
        network: Any = AutoModelForCausalLM.from_pretrained(
            job.model, trust_remote_code=job.trust_remote_code, use_safetensors=True, **options
        ).eval()
    if job.device_map:
        device = device_map.first(network)
    else:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        network.to(device)
    print(_text(job, network, tokenizer, device, chat=chat), flush=True)


def _reading(job: Generate) -> AbstractContextManager[None]:
    """Its files may be somebody else's."""
    wanted, fix = "files that transformers reads, with weights as safetensors", "export it again: dray model export RUN"
    return errors.refusing("the model cannot be read", where=job.model, wanted=wanted, fix=fix)


def _shell(job: Generate, settings: PreTrainedConfig) -> Any:  # noqa: ANN401  a transformers model
    """The model without its weights and without room for them, in the type of its file."""
    with _reading(job), torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            settings, trust_remote_code=job.trust_remote_code, dtype=settings.dtype or torch.float32
        )


def _text(job: Generate, network: Any, tokenizer: Any, device: torch.device, *, chat: bool) -> str:  # noqa: ANN401
    if chat:
        messages = [{"role": "user", "content": job.prompt}]
        with errors.refusing(
            "the chat template refuses the prompt",
            where=job.model,
            wanted="a template that accepts one message of role user",
            fix="train with another model.tokenizer",
        ):
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    else:
        prompt = tokenizer(job.prompt or tokenizer.eos_token, return_tensors="pt").input_ids
    positions = getattr(network.config, "max_position_embeddings", None)
    room = positions - prompt.shape[1] if positions else _MANY
    tokens = job.tokens or max(1, min(_MANY, room))
    if tokens > room and positions:
        raise ConfigError(
            "the prompt and the new tokens are longer than the model's max_position_embeddings",
            wanted=f"at most {positions} tokens",
            found=f"{prompt.shape[1]} tokens in the prompt, and {tokens} new ones",
            fix=f"--tokens {room}, or a shorter prompt" if room > 0 else "a shorter prompt",
        )
    torch.manual_seed(job.seed)
    chosen: dict[str, Any] = (
        {"do_sample": True, "temperature": job.temperature} if job.temperature else {"do_sample": False}
    )
    # In the type of its file, so that the likeliest tokens are the same ones on a CPU.
    prompt = prompt.to(device)
    written = network.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=tokens,
        pad_token_id=tokenizer.eos_token_id,
        **chosen,
    )
    shown = written[0, prompt.shape[1] :] if chat else written[0]
    return str(tokenizer.decode(shown, skip_special_tokens=True))
