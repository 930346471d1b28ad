//! The image formats.

pub mod qcow2;
