//! The graph: its exchange under load, its stages, and what they do in trouble.

#[path = "../common/mod.rs"]
mod common;

mod exchange;
mod hold;
mod limits;
mod shape;
mod stages;
mod threads;
mod troubles;
