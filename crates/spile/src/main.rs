//! The Spile program (being built).
fn main() {}
