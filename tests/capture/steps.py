"""Steps of a user's own, good and bad, for the tests: py:steps:NAME."""

import contextlib
import copy
import os
import signal
import sys
import time

import torch


def matmul(device):
    x = torch.randn(64, 64, device=device)
    return lambda: x @ x


def phases(device):
    state = []
    return {"forward": lambda: state.append(1), "backward": lambda: state.pop()}


def chatty(device):
    print('{"event": "Done", "status": "ok"}', flush=True)  # what a step prints is not an event
    return lambda: sys.stdout.write("noise\n")


def crashes(device):
    return lambda: os.kill(os.getpid(), signal.SIGSEGV)


def killed(device):
    return lambda: os.kill(os.getpid(), signal.SIGKILL)


def exits(device):
    return lambda: os._exit(7)


def quits(device):
    return lambda: sys.exit(3)


def stops_to_debug(device):
    return lambda: breakpoint()


def asks(device):
    return lambda: input("go on? ")


def writes_anywhere(device):
    def step():
        for fd in range(3, 4096):
            with contextlib.suppress(OSError):
                os.write(fd, b"noise\n")

    return step


def writes_low(device):
    def step():
        for fd in range(3, 64):
            with contextlib.suppress(OSError):
                os.write(fd, b"noise\n")

    return step


def closes_all(device):
    """As a daemon does; and the numbers are given to files of the step's own."""

    def step():
        os.closerange(3, 4096)
        for _ in range(3, 1000):
            os.open(os.devnull, os.O_WRONLY)

    return step


def forks_and_returns(device):
    return lambda: os.fork()


def leaves_processes(device):
    """A child in a session of its own whose parent is gone; their numbers are printed."""

    def step():
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                print("left", os.getpid(), flush=True)
                time.sleep(1000)
            os._exit(0)
        os.wait()

    return step


def prints_much(device):
    print("the beginning", flush=True)

    def step():
        for _ in range(160):
            os.write(1, b"x" * (1 << 16))
        print("\nthe end", flush=True)

    return step


def counts_descriptors(device):
    """Which it has beyond the standard ones, and whether any leads to a pipe that can be read."""

    def step():
        for name in sorted(os.listdir("/proc/self/fd"), key=int):
            with contextlib.suppress(OSError):
                print("descriptor", name, os.readlink(f"/proc/self/fd/{name}"), flush=True)

    return step


def raises(device):
    def step():
        raise ValueError("no\nluck")

    return step


def out_of_memory(device):
    return lambda: torch.empty(2**50)


def fails_after_five(device):
    calls = []

    def step():
        calls.append(1)
        if len(calls) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    return step


def hangs(device):
    return lambda: time.sleep(1000)


def hangs_deaf(device):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return lambda: time.sleep(1000)


def slow(device):
    return lambda: time.sleep(0.02)


def wrong_return(device):
    return 42


def wrong_phase(device):
    return {"step": lambda: None, "other": lambda: None}


not_callable = 5


def trains(device):
    """A step of one piece: forward, loss, backward and optimizer, as many people write it."""
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 5)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.randn(16, 8, device=device), torch.zeros(16, dtype=torch.long, device=device)

    def step():
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def reads_a_number(device):
    x = torch.randn(4, device=device)
    return lambda: x.sum().item()


def counts_by_values(device):
    x = torch.randn(4, device=device)
    return lambda: x.nonzero().sum()


def transformers_llama(device):
    """Two layers with grouped queries, and an AdamW of torch's defaults."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads, use_cache=False)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 256, (2, 32), device=device)

    def step():
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def wants_cuda(device):
    return lambda: torch.zeros(4, device="cuda")


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 32)
        self.layers = torch.nn.ModuleList(Block() for _ in range(4))
        self.head = torch.nn.Linear(32, 50)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


seen = {}  # what the last step made: for the tests


def transformer(device, optimizer_class=torch.optim.AdamW, scaler=None):
    """A Transformer's training step in phases."""
    torch.manual_seed(0)
    model = Model().to(device)
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = optimizer_class(model.parameters(), lr=3e-3)
    tokens = torch.arange(64, device=device).view(2, 32) % 50
    seen.clear()
    seen.update(model=model, optimizer=optimizer, losses=[], dtypes=[])
    state = {}

    def forward():
        optimizer.zero_grad()
        state["logits"] = model(tokens)
        seen["dtypes"].append(state["logits"].dtype)

    def loss():
        state["loss"] = criterion(state["logits"].flatten(0, 1).float(), tokens.flatten())
        seen["losses"].append(state["loss"].item() if device.type == "cpu" else 0.0)

    def backward():
        (scaler.scale(state["loss"]) if scaler else state["loss"]).backward()

    def update():
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()

    return {"forward": forward, "loss": loss, "backward": backward, "optimizer": update}


def transformer_with_scaler(device):
    return transformer(device, scaler=torch.amp.GradScaler(device.type))


def transformer_sgd(device):
    return transformer(device, torch.optim.SGD)


def transformer_in_one(device):
    """The same step as one callable."""
    phases = transformer(device)

    def step():
        for phase in phases.values():
            phase()

    return step


class Plain(torch.optim.Optimizer):
    """An optimizer of someone's own."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * parameter.grad)


def own_optimizer(device):
    return transformer(device, Plain)


def already_compiled(device):
    model = torch.compile(torch.nn.Linear(4, 4), backend="eager")
    return lambda: model(torch.ones(2, 4))


def calls_forward(device):
    model = torch.nn.Linear(4, 4)
    return lambda: model.forward(torch.ones(2, 4))


def no_blocks(device):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    return lambda: model(torch.ones(2, 4))


def torchs_own(device):
    """A model of torch.nn's own classes alone, layer within layer, and one of another shape."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(9)))
    head = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    x = torch.randn(16, 8, device=device, requires_grad=True)
    seen.clear()
    seen.update(model=model, losses=[], keys=list(model.state_dict()))

    def step():
        optimizer.zero_grad()
        loss = head(model(x)[:4]).square().mean()
        loss.backward()
        optimizer.step()
        seen["losses"].append(loss.item())

    return step


def recurrent(device):
    """What the compiler does not take."""
    model, x = torch.nn.LSTM(4, 4), torch.ones(2, 3, 4)
    return lambda: model(x)


def ends(device):
    os._exit(0)


def ends_later(device):
    calls = []

    def step():
        calls.append(1)
        if len(calls) > 3:
            os._exit(0)

    return step


def learns(device, returned=lambda loss: loss):
    """A training step that returns its loss."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1).to(device)
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(16, 8, device=device)

    def step():
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return returned(loss)

    return step


def learns_in_a_mapping(device):
    return learns(device, lambda loss: {"logits": torch.ones(4), "loss": loss.item()})


def copied_layers(device):
    """As nn.TransformerEncoder makes its layers."""
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    model = torch.nn.Sequential(copy.deepcopy(layer), copy.deepcopy(layer)).to(device)
    x = torch.randn(4, 8, device=device)
    del layer
    return lambda: model(x).sum().backward()


def copied_model(device):
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(2)))
    model = copy.deepcopy(model).to(device)
    x = torch.randn(4, 8, device=device)
    return lambda: model(x).sum().backward()


def _attends(device, mode, narrow=False):
    turned = torch.nn.Linear(64, 64, device=device)
    qkv, out = torch.nn.Linear(64, 192, device=device), torch.nn.Linear(64, 64, device=device)
    norm, x = torch.nn.LayerNorm(64, device=device), torch.randn(2, 16, 64, device=device)

    def step():
        with mode(), torch.autocast(device.type, dtype=torch.bfloat16, enabled=narrow):
            turned(x.transpose(0, 1))
            q, k, v = (t.view(2, 16, 4, 16).transpose(1, 2) for t in qkv(norm(x)).chunk(3, -1))
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            return torch.nn.functional.rms_norm(out(y.transpose(1, 2).reshape(2, 16, 64)), (64,))

    return step


def under_no_grad(device):
    return _attends(device, torch.no_grad)


def in_inference_mode(device):
    return _attends(device, torch.inference_mode)


def narrow_under_no_grad(device):
    return _attends(device, torch.no_grad, narrow=True)


def narrow_in_inference_mode(device):
    return _attends(device, torch.inference_mode, narrow=True)


def with_dropout(device):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)).to(device)
    x = torch.ones(4, 8, device=device)

    def step():
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return step
