"""The chunked vocabulary head against a dense float64 softmax."""

from __future__ import annotations

import pytest
import torch

from megarl.train.megatron.heads import vocab_log_probs

N, H, V, PADDED = 23, 16, 37, 64


def make(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(N, H, generator=generator).to(dtype)
    weight = torch.randn(PADDED, H, generator=generator).to(dtype)
    positions = torch.tensor([0, 1, 4, 5, 6, 9, 20, 22, 9])
    targets = torch.randint(0, V, (len(positions),), generator=generator)
    return hidden, weight, positions, targets


def dense(hidden, weight, positions, targets, temperature):
    logits = hidden.double()[positions] @ weight.double()[:V].t() / temperature
    log_p = logits.log_softmax(-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def gradients(outputs, inputs):
    """Gradient of a loss in which every output has its own weight, so that no two can be confused."""
    loss = sum(
        (output.double() * torch.linspace(0.5, 2, len(output), dtype=torch.float64) * (-1) ** i).sum()
        for i, output in enumerate(outputs)
    )
    return torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_log_probs_entropy_and_gradients_equal_a_dense_softmax(temperature, chunk):
    hidden, weight, positions, targets = make()
    hidden.requires_grad_()
    weight.requires_grad_()
    expected = dense(hidden, weight, positions, targets, temperature)
    actual = vocab_log_probs(
        hidden,
        weight,
        targets,
        vocab_size=V,
        positions=positions,
        temperature=temperature,
        chunk_tokens=chunk,
        with_entropy=True,
    )
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=1e-5, atol=1e-5)
    for a, e in zip(gradients(actual, (hidden, weight)), gradients(expected, (hidden, weight)), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_sums_of_squared_probabilities_equal_a_dense_softmax_and_change_nothing_else(chunk):
    hidden, weight, positions, targets = make()
    squares = torch.full((len(targets),), torch.nan)
    options = {"vocab_size": V, "positions": positions, "temperature": 0.7, "chunk_tokens": chunk, "with_entropy": True}
    with_squares = vocab_log_probs(hidden, weight, targets, **options, sum_pi_squared=squares)
    p = (hidden.double()[positions] @ weight.double()[:V].t() / 0.7).softmax(-1)
    torch.testing.assert_close(squares.double(), p.square().sum(-1), rtol=1e-5, atol=1e-6)
    for a, b in zip(with_squares, vocab_log_probs(hidden, weight, targets, **options), strict=True):
        assert torch.equal(a, b)


def test_log_prob_gradient_alone_equals_dense():
    hidden, weight, positions, targets = make()
    hidden.requires_grad_()
    weight.requires_grad_()
    log_probs, entropy = vocab_log_probs(hidden, weight, targets, vocab_size=V, positions=positions, chunk_tokens=4)
    assert entropy is None
    expected, _ = dense(hidden, weight, positions, targets, 1.0)
    for a, e in zip(gradients([log_probs], (hidden, weight)), gradients([expected], (hidden, weight)), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)


def test_gradient_agrees_with_finite_differences():
    hidden, weight, positions, targets = make()
    hidden.requires_grad_()
    direction = torch.randn(N, H, generator=torch.Generator().manual_seed(5))

    def loss(at):
        log_probs, entropy = vocab_log_probs(
            at, weight, targets, vocab_size=V, positions=positions, with_entropy=True, temperature=1.3
        )
        return log_probs.double().sum() + 0.3 * entropy.double().sum()

    (grad,) = torch.autograd.grad(loss(hidden), hidden)
    step = 1e-2
    difference = (loss(hidden + step * direction) - loss(hidden - step * direction)) / (2 * step)
    torch.testing.assert_close((grad * direction).sum().double(), difference.detach(), rtol=1e-3, atol=1e-3)


def test_padded_columns_have_no_probability_and_no_gradient():
    hidden, weight, positions, targets = make()
    weight[V:] = 1e4
    weight.requires_grad_()
    log_probs, entropy = vocab_log_probs(hidden, weight, targets, vocab_size=V, positions=positions, with_entropy=True)
    assert torch.isfinite(log_probs).all() and (entropy <= torch.tensor(V).log() + 1e-5).all()
    (grad,) = torch.autograd.grad(log_probs.sum() + entropy.sum(), weight)
    assert (grad[V:] == 0).all() and (grad[:V] != 0).any()


def test_bfloat16_inputs_give_float32_results_and_bfloat16_gradients():
    hidden, weight, positions, targets = make(torch.bfloat16)
    hidden.requires_grad_()
    log_probs, _ = vocab_log_probs(hidden, weight, targets, vocab_size=V, positions=positions, chunk_tokens=3)
    expected, _ = dense(hidden, weight, positions, targets, 1.0)
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs.double(), expected, rtol=0, atol=1e-5)  # logits of bfloat16 would be 1e-2 off
    (grad,) = torch.autograd.grad(log_probs.sum(), hidden)
    assert grad.dtype == torch.bfloat16


def test_no_targets_give_an_empty_result_with_a_graph():
    hidden, weight, _, _ = make()
    hidden.requires_grad_()
    none = torch.zeros(0, dtype=torch.int64)
    log_probs, _ = vocab_log_probs(hidden, weight, none, vocab_size=V, positions=none)
    (grad,) = torch.autograd.grad(log_probs.sum(), hidden)
    assert log_probs.shape == (0,) and (grad == 0).all()


def test_memory_of_the_head_does_not_grow_with_vocabulary_times_tokens():
    """The largest tensor the head makes is a chunk of logits, never [N, V]."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, torch.Tensor):
                    self.numel = max(self.numel, tensor.numel())
            return out

    tokens, vocab = 512, 4096
    hidden = torch.randn(tokens, 8).requires_grad_()
    weight = torch.randn(vocab, 8).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,))
    with Largest() as seen:
        log_probs, entropy = vocab_log_probs(
            hidden, weight, targets, vocab_size=vocab, chunk_tokens=16, with_entropy=True
        )
        (log_probs.sum() + entropy.sum()).backward()
    assert 16 * vocab <= seen.numel < tokens * vocab / 8


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"chunk_tokens": 0}])
def test_options_that_mean_nothing_are_refused(options):
    hidden, weight, positions, targets = make()
    with pytest.raises(ValueError, match=next(iter(options))):
        vocab_log_probs(hidden, weight, targets, vocab_size=V, positions=positions, **options)
