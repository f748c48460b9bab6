"""Under the transformations of JAX, and over several devices; and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import backnorm.jax
from backnorm.errors import ArgumentTypeError, ArgumentValueError
from backnorm.jax.ffi import TARGET

from .conftest import EPSILON, agree
from .one_layer import AXIS, SHAPE, ours, theirs


class TestJit:
    def test_jit_of_grad_lowers_to_two_kernel_calls_without_callback(self, inputs, pair):
        text = jax.jit(jax.grad(pair[0], (0, 1, 2))).lower(*inputs).as_text()
        assert text.count(f"custom_call @{TARGET}") == 2
        assert "callback" not in text

    def test_jit_lowered_for_cuda_has_no_custom_call(self, inputs):
        lowered = jax.jit(ours).trace(*inputs).lower(lowering_platforms=("cuda",))
        assert "custom_call" not in lowered.as_text()

    def test_jit_of_batch_norm_compiles_without_copy_or_transpose(self, inputs):
        text = jax.jit(ours).lower(*inputs).compile().as_text()
        assert "custom-call" in text
        assert " copy(" not in text
        assert " transpose(" not in text

    def test_batch_norm_within_larger_jit_matches_textbook(self, inputs):
        def function(layer):
            return jax.jit(lambda x, *rest: layer(jnp.tanh(x).T.T @ jnp.eye(4), *rest)[0] * 2.0)

        agree(function(ours)(*inputs), function(theirs)(*inputs))

    def test_grad_without_jit_matches_textbook(self, inputs, pair):
        with jax.disable_jit():
            found = jax.grad(pair[0], (0, 1, 2))(*inputs)
        agree(found, jax.grad(pair[1], (0, 1, 2))(*inputs))

    def test_exported_function_for_two_platforms_matches_textbook(self, inputs):
        compiled = jax.jit(lambda *operands: ours(*operands)[0])
        allowed = [export.DisabledSafetyCheck.custom_call(TARGET)]
        exported = export.export(compiled, platforms=["cpu", "cuda"], disabled_checks=allowed)
        again = export.deserialize(exported(*inputs).serialize())
        agree(again.call(*inputs), theirs(*inputs)[0])

    def test_exported_gradient_with_symbolic_shape_matches_jit(self, inputs, pair):
        (size,) = export.symbolic_shape("size")
        x = jax.ShapeDtypeStruct((size, *SHAPE[1:]), jnp.float64)

        def loss(x, gamma, beta):
            y, mean, variance = ours(x, gamma, beta)
            return jnp.sum(jnp.sin(y) ** 3) + jnp.sum(mean * variance)

        exported = export.export(jax.jit(jax.grad(loss)))(x, *inputs[1:])
        agree(exported.call(*inputs), jax.jit(jax.grad(loss))(*inputs))


class TestGrad:
    def test_repeated_grad_is_not_compiled_again(self, inputs, pair):
        first = jax.grad(pair[0], (0, 1, 2))

        def second(*operands):
            return jax.grad(lambda *g: jnp.sum(jnp.sin(first(*g)[0])), (0, 1, 2))(*operands)

        seen = []
        for _ in range(2):
            first(*inputs), second(*inputs)
        listener = lambda event, *_, **__: seen.append(event)  # noqa: E731
        jax.monitoring.register_event_duration_secs_listener(listener)
        try:
            first(*inputs), second(*inputs)
            assert not [event for event in seen if "backend_compile" in event]
            jax.jit(lambda x: x * 1.2345)(inputs[0])
            assert [event for event in seen if "backend_compile" in event]
        finally:
            jax.monitoring.unregister_event_duration_listener(listener)

    def test_grad_of_checkpoint_matches_textbook(self, inputs, pair):
        agree(
            jax.jit(jax.grad(jax.checkpoint(pair[0]), (0, 1, 2)))(*inputs),
            jax.grad(pair[1], (0, 1, 2))(*inputs),
        )

    @pytest.mark.long
    def test_grad_of_scan_matches_textbook(self, inputs, normal):
        x, gamma, beta = inputs
        weight = normal(*SHAPE)

        def loss(layer):
            def step(carry, scale):
                y, _, variance = layer(carry, gamma * scale, beta)
                # Once more, and only for its statistics.
                return jnp.tanh(y), jnp.sum(layer(y, gamma, beta)[2] + variance)

            def total(x, gamma):
                last, seen = jax.lax.scan(step, x, jnp.arange(1.0, 5.0))
                return jnp.sum(last * weight) + jnp.sum(seen**2) + jnp.sum(gamma)

            return total

        first = [jax.grad(loss(layer), (0, 1)) for layer in (ours, theirs)]
        agree(*(jax.jit(each)(x, gamma) for each in first))
        second = [jax.grad(lambda x, f=f: jnp.sum(f(x, gamma)[0] * weight)) for f in first]
        agree(*(jax.jit(each)(x) for each in second))

    def test_grad_of_statistics_alone_matches_textbook(self, inputs):
        for k in (1, 2):
            mine = jax.grad(lambda x, k=k: jnp.sum(ours(x, *inputs[1:])[k] ** 2))(inputs[0])
            agree(mine, jax.grad(lambda x, k=k: jnp.sum(theirs(x, *inputs[1:])[k] ** 2))(inputs[0]))

    def test_vjp_function_called_twice_matches_textbook(self, inputs, pair):
        (_, mine), (_, other) = (jax.vjp(each, *inputs) for each in pair)
        for scale in (1.0, 2.0):
            agree(mine(scale), other(scale))


class TestVmap:
    @pytest.mark.covering(0)
    @pytest.mark.parametrize(
        "axes", [(0, None, None), (2, None, None), (None, 0, None), (None, None, 1), (0, 0, 1)]
    )
    def test_vmap_along_different_axes_matches_textbook(self, axes, inputs, pair, normal):
        operands = [
            each if axis is None else jnp.stack([each, each + 1.5 * normal(*each.shape)], axis)
            for each, axis in zip(inputs, axes, strict=True)
        ]
        for mine, other in ((ours, theirs), (jax.grad(pair[0]), jax.grad(pair[1]))):
            agree(*(jax.jit(jax.vmap(each, axes))(*operands) for each in (mine, other)))

    def test_nested_vmap_and_its_gradients_match_textbook(self, inputs, pair, normal):
        x = normal(2, 3, *SHAPE)
        gamma, beta = normal(3, SHAPE[AXIS]), normal(2, SHAPE[AXIS])

        def mapped(function):
            return jax.vmap(jax.vmap(function, (0, 0, None)), (0, None, 0))

        agree(mapped(ours)(x, gamma, beta), mapped(theirs)(x, gamma, beta))
        first = [mapped(jax.grad(each, (0, 1, 2))) for each in pair]
        agree(*(jax.jit(each)(x, gamma, beta) for each in first))

    def test_vmap_lowers_to_one_kernel_call_without_transpose(self, inputs, normal):
        x, (_, gamma, beta) = normal(3, *SHAPE), inputs
        text = jax.jit(jax.vmap(ours, (0, None, None))).lower(x, gamma, beta).as_text()
        assert text.count(f"custom_call @{TARGET}") == 1
        assert " transpose(" not in text

    def test_jacrev_matches_textbook(self, inputs):
        x, gamma, beta = inputs
        found = [
            jax.jit(jax.jacrev(lambda x, layer=layer: layer(x, gamma, beta)[0]))(x)
            for layer in (ours, theirs)
        ]
        agree(*found)

    def test_jacrev_of_grad_matches_textbook(self, inputs, pair):
        x, gamma, beta = inputs[0][:2, :2, :3], inputs[1][:2], inputs[2][:2]
        weight = inputs[0][2:4, :2, :3]
        found = [
            jax.jit(
                jax.jacrev(
                    jax.grad(
                        lambda x, layer=layer: jnp.sum(jnp.sin(layer(x, gamma, beta)[0]) * weight)
                    )
                )
            )(x)
            for layer in (ours, theirs)
        ]
        agree(*found)

    def test_vmap_of_backward_with_shared_x_matches_loop(self, inputs, normal):
        x, gamma, _ = inputs
        dy, mean, variance = normal(3, *SHAPE), normal(5), normal(5) ** 2 + 1.0

        def function(dy):
            return backnorm.jax.batch_norm_backward(
                x, dy, mean, variance, gamma, epsilon=EPSILON, axis=AXIS
            )

        expected = [function(each) for each in dy]
        agree(jax.vmap(function)(dy), [jnp.stack(each) for each in zip(*expected, strict=True)])

    def test_vmap_over_no_instances_returns_empty_results(self, inputs):
        y, mean, _ = jax.vmap(ours, (0, None, None))(jnp.zeros((0, *SHAPE)), *inputs[1:])
        assert y.shape == (0, *SHAPE)
        assert mean.shape == (0, SHAPE[AXIS])


# A batch of eight on four devices.
WHOLE, PARTS = (8, 5, 4), (4, 2, 5, 4)


@pytest.mark.long
class TestDevices:
    @pytest.fixture
    def spread(self, layer, normal):
        """Inputs with a leading axis of devices, and the functions of a device's part."""
        x, gamma, beta = layer(WHOLE, AXIS)
        w, v = normal(*WHOLE), normal(5)

        def loss(layer, name="d"):
            def function(x, gamma, beta, w):
                y, mean, variance = layer(x, gamma, beta, axis_name=name)
                return jnp.sum(jnp.sin(y) * w) + jnp.sum(mean * v) + jnp.sum(variance**2 * v)

            return function

        return (x, gamma, beta, w), loss

    @pytest.fixture
    def orders(self, normal):
        """First derivatives, and first and second derivatives, of a function."""
        weights = [normal(5), normal(5)]

        def first(loss):
            return jax.grad(loss, (0, 1, 2))

        def second(loss):
            def total(x, gamma, beta, w):
                found = first(loss)(x, gamma, beta, w)
                parts = [jnp.sum(jnp.cos(found[0]))]
                parts += [
                    jnp.sum(jnp.cos(each) * weight)
                    for each, weight in zip(found[1:], weights, strict=True)
                ]
                return sum(parts)

            return first(total)

        return first, second

    @pytest.mark.parametrize("order", [0, 1])
    @pytest.mark.parametrize("mapped", [jax.pmap, jax.vmap])
    def test_gradients_in_pmap_or_vmap_with_axis_name_match_textbook(
        self, mapped, order, spread, orders
    ):
        (x, gamma, beta, w), loss = spread
        operands = (x.reshape(PARTS), gamma, beta, w.reshape(PARTS))
        axes = (0, None, None, 0)
        found = [
            mapped(orders[order](loss(layer)), axis_name="d", in_axes=axes)(*operands)
            for layer in (ours, theirs)
        ]
        agree(*found)

    @pytest.mark.parametrize(
        ("name", "outside", "checked", "order"),
        [
            ("d", False, True, 1),
            ("d", False, False, 1),
            ("d", True, True, 1),
            ("d", True, False, 0),
            (None, False, True, 1),
            (None, True, False, 0),
        ],
    )
    def test_gradients_with_shard_map_match_textbook(
        self, name, outside, checked, order, spread, orders
    ):
        operands, loss = spread
        mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
        specs = (P("d"), P(), P(), P("d"))

        def shared(function, out):
            return jax.shard_map(
                function, mesh=mesh, in_specs=specs, out_specs=out, check_vma=checked
            )

        def found(layer):
            part = loss(layer, name)
            if outside:
                # Differentiated from outside: the sum of what the devices return.
                each = shared(lambda *operands: part(*operands)[None], P("d"))
                return jax.jit(orders[order](lambda *operands: jnp.sum(each(*operands))))(*operands)
            # JAX adds up the gradients of what is the same on all devices where it knows that.
            same = P() if checked else P("d")
            return jax.jit(shared(orders[order](part), (P("d"), same, same)))(*operands)

        agree(found(ours), found(theirs))

    def test_gradients_over_two_mesh_axes_match_textbook(self, spread, orders):
        operands, loss = spread
        mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
        both = P(("a", "b"))
        found = [
            jax.jit(
                jax.shard_map(
                    orders[0](loss(layer, ("a", "b"))),
                    mesh=mesh,
                    in_specs=(both, P(), P(), both),
                    out_specs=(both, P(), P()),
                )
            )(*operands)
            for layer in (ours, theirs)
        ]
        agree(*found)

    def test_pmap_with_axis_name_matches_whole_batch(self, spread):
        (x, gamma, beta, _), _ = spread
        y, mean, variance = jax.pmap(lambda x: ours(x, gamma, beta, axis_name="d"), axis_name="d")(
            x.reshape(PARTS)
        )
        whole = theirs(x, gamma, beta)
        agree((y.reshape(WHOLE), mean[0], variance[3]), whole)

    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
    def test_gradients_of_array_sharded_by_compiler_match_textbook(self, kind, spread, orders):
        operands, loss = spread
        mesh = jax.make_mesh((4,), ("d",), axis_types=(kind,))
        placed = [
            jax.device_put(each, NamedSharding(mesh, P("d") if each.ndim > 1 else P()))
            for each in operands
        ]
        with jax.set_mesh(mesh):
            found = jax.jit(orders[0](loss(ours, None)))(*placed)
        agree([np.asarray(each) for each in found], orders[0](loss(theirs, None))(*operands))


class TestErrors:
    def refused(self, kind, message, *operands, function=backnorm.jax.batch_norm, **options):
        # Under jit too: an error comes when a function is traced.
        def call(*arrays):
            return function(*arrays, **{"epsilon": EPSILON, "axis": AXIS, **options})

        with pytest.raises(kind, match=message):
            call(*operands)
        if all(isinstance(each, jax.Array) for each in operands):
            with pytest.raises(kind, match=message):
                jax.jit(call)(*operands)

    def test_batch_norm_with_wrong_array_raises_error_naming_it(self, inputs):
        x, gamma, beta = inputs
        self.refused(ArgumentTypeError, r"^x: must be an array; got list", [[1.0]])
        self.refused(ArgumentTypeError, r"^x: must be an array; got None", None)
        self.refused(ArgumentTypeError, r"^gamma: must be an array; got float", x, 1.0)
        self.refused(ArgumentTypeError, r"^x: unsupported", jax.random.key(0)[None], axis=0)
        narrow = gamma.astype(jnp.float32)
        mixed = x.astype(jnp.bfloat16), narrow, beta.astype(jnp.bfloat16)
        self.refused(ArgumentTypeError, r"^beta: .*bfloat16; expected float32", *mixed)
        self.refused(ArgumentValueError, r"^axis: .*rank 0", jnp.float64(1.0), axis=0)

    def test_traced_epsilon_raises_type_error_and_number_of_numpy_is_accepted(self, inputs):
        x = inputs[0]
        with pytest.raises(ArgumentTypeError, match=r"^epsilon: .*traced.*static_argnames"):
            jax.jit(lambda epsilon: backnorm.jax.batch_norm(x, epsilon=epsilon))(1e-3)
        backnorm.jax.batch_norm(x, epsilon=np.float32(1e-3))

    def test_axis_name_unbound_or_of_wrong_type_raises_error(self, inputs):
        x = inputs[0]
        self.refused(ArgumentValueError, r"^axis_name: .*'d'", x, axis_name="d")
        self.refused(ArgumentTypeError, r"^axis_name: .*dict", x, axis_name=[{}])
