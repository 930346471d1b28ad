//! The life of a disk: what is done to its images while it is served, and while it is not.
//!
//! Everything here works on the traits of `core` and on nodes, and names no format: so the same code
//! changes the disks of a running server, works on files from the command line, and is ended at any step by the simulator.
//!
//! The path of a disk names its writable leaf at every moment. Work that is under way leaves files beside the disk, whose names
//! [`names`] gives; whoever opens the disk next finds them there, and goes on or takes back.
#![forbid(unsafe_code)]

pub mod names;
