//! Development tasks (being built).
fn main() {}
