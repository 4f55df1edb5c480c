//! Tests of what several parts of the work have in common.

mod command_cost;
