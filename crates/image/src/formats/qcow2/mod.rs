//! qcow2, for reading.

pub mod codec;
