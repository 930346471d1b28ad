//! The server of disks: it opens images, puts fronts over them, and is asked and told things while it runs.
//!
//! - [`serving`]: `spile serve`: disks for NBD clients and virtual machines, the control socket, the takeover.
//! - [`xen`]: `spile xen-disk` and `spile xen-backend`: disks for Xen guests.
//! - [`disks`] names and opens disks, [`parents`] says how children name their parents, [`family`] who is whose child, [`far_children`] notes those in other folders,
//!   [`host`] says what a family of images is asked by,
//!   [`revert`] has a disk go back, [`checkpoints`] notes what is changed in them, [`listen`] makes sockets, [`socket_path`] reaches those with long paths, [`signals`] ends a process in order, [`panics`] ends one that has a
//!   bug, [`receiving`] takes in disks that other hosts move here, [`process`] names other processes, [`host_device`] reads what the kernel
//!   counts of the device below a disk, [`log`] writes what the libraries report.
//!
//! This crate joins fronts and images. It imports nothing that measures (`bench`) or imitates (`lab`).
#![forbid(unsafe_code)]

pub mod backup;
pub mod beneath;
pub mod checkpoints;
pub mod disks;
pub mod family;
pub mod far_children;
pub mod grow;
pub mod host;
pub mod host_device;
pub mod inner_bitmaps;
pub mod jobs;
pub mod limits;
pub mod listen;
pub mod log;
mod look;
pub mod new_file;
mod noted;
pub mod notify;
pub mod panics;
pub mod parents;
pub mod process;
pub mod receiving;
pub mod revert;
pub mod serving;
pub mod signals;
pub mod socket_path;
pub mod stamps;
pub mod tuned;
pub mod units;
pub mod uri;
pub mod xen;
