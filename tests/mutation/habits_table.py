"""The mutations of a stranger's habits: one section per row U1 to U17."""

from tests.mutation.table import Mutation

HABITS: tuple[Mutation, ...] = (
    # ---- U1 ----
    # ---- U2 ----
    # ---- U3 ----
    # ---- U4 ----
    # ---- U5 ----
    # ---- U6 ----
    # ---- U7 ----
    # ---- U8 ----
    # ---- U9 ----
    # ---- U10 ----
    # ---- U11 ----
    # ---- U12 ----
    # ---- U13 ----
    # ---- U14 ----
    # ---- U15 ----
    # ---- U16 ----
    # ---- U17 ----
)
