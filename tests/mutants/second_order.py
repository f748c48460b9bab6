"""A right second order in steps, and steps of which each makes it wrong."""

from __future__ import annotations

import numpy as np

Wide = np.longdouble


class SecondOrder:
    """The right closed form, training; x is (N, C, ...). `steps` replace methods."""

    def __init__(self, **steps):
        vars(self).update(steps)

    def __call__(
        self, x, dy, mean, variance, gamma, *, ddx, ddgamma, ddbeta, epsilon, data_format, training
    ):
        assert data_format == "NCX"
        assert training

        def rows(tensor):
            return np.moveaxis(tensor, 1, 0).reshape(x.shape[1], -1).astype(Wide)

        def tensor(values):
            moved = values.reshape(x.shape[1], *np.delete(x.shape, 1))
            return np.moveaxis(moved, 0, 1).astype(x.dtype)

        v, d, e = rows(x), rows(dy), rows(ddx)
        m, w, g, dg, db = (
            a.astype(Wide)[:, None] for a in (mean, variance, gamma, ddgamma, ddbeta)
        )
        count = d.shape[1]
        s = 1 / np.sqrt(w + Wide(epsilon))
        h = (v - m) * s
        p, q = (e * h).sum(1, keepdims=True), (d * h).sum(1, keepdims=True)
        c_d, c_e = d - d.mean(1, keepdims=True), e - e.mean(1, keepdims=True)
        r = self.covariance(d, e, c_d, c_e)
        by_x = self.by_x(g, s, count, h, p, q, r, c_d, c_e)
        by_x = by_x + self.by_x_of_dgamma(dg, s, count, h, q, d, c_d)
        by_dy = self.by_dy(g, s, count, h, p, e, c_e) + dg * h + self.beta(db)
        by_gamma = self.by_gamma(s, count, p, q, r)[:, 0]
        return tensor(by_x), tensor(by_dy), by_gamma.astype(mean.dtype)

    def covariance(self, d, e, c_d, c_e):
        return (c_d * c_e).sum(1, keepdims=True)

    def by_x(self, g, s, count, h, p, q, r, c_d, c_e):
        return g * s**2 / count * (h * (3 * p * q / count - r) - p * c_d - q * c_e)

    def by_x_of_dgamma(self, dg, s, count, h, q, d, c_d):
        return dg * s * (c_d - h * q / count)

    def by_dy(self, g, s, count, h, p, e, c_e):
        return g * s * (c_e - h * p / count)

    def by_gamma(self, s, count, p, q, r):
        return s * (r - p * q / count)

    def beta(self, ddbeta):
        return ddbeta


RIGHT = SecondOrder()


def with_mean_of_dy(g, s, count, h, p, q, r, c_d, c_e):
    return RIGHT.by_x(g, s, count, h, p, q, r, c_d + 0.1, c_e)


def with_one_s(g, s, *factors):
    return RIGHT.by_x(g, s, *factors) / s


#: A mistake -> the wrong steps.
WRONG = {
    "the deviation enters s**2 twice, and not s once more": {
        "by_x": lambda g, s, count, h, p, q, r, c_d, c_e: (
            g * s**2 / count * (h * (2 * p * q / count - r) - p * c_d - q * c_e)
        ),
    },
    "sum(dy * ddx) is taken without its means": {
        "covariance": lambda d, e, c_d, c_e: (d * e).sum(1, keepdims=True),
    },
    "the variance is a constant when differentiating by x": {
        "by_x": lambda g, s, count, h, p, q, r, c_d, c_e: -g * s**2 / count * (p * c_d + q * c_e),
    },
    "the term along ddx is left out": {
        "by_x": lambda g, s, count, h, p, q, r, c_d, c_e: (
            g * s**2 / count * (h * (3 * p * q / count - r) - p * c_d)
        ),
    },
    "dy is not centred in the term along P": {"by_x": with_mean_of_dy},
    "s instead of s**2 in the gradient of x": {"by_x": with_one_s},
    "gamma does not scale the gradient of dy": {
        "by_dy": lambda g, *factors: RIGHT.by_dy(1, *factors),
    },
    "the gradient of dy is that of frozen statistics": {
        "by_dy": lambda g, s, count, h, p, e, c_e: g * s * e,
    },
    "the gradient of dgamma is that of frozen statistics": {
        "by_x_of_dgamma": lambda dg, s, count, h, q, d, c_d: dg * s * d,
    },
    "the gradient of gamma lacks the product of the sums along x": {
        "by_gamma": lambda s, count, p, q, r: s * r,
    },
    "ddbeta is ignored": {"beta": lambda ddbeta: 0 * ddbeta},
}
