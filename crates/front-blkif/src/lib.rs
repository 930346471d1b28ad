//! Serves a disk to a Xen guest: straight from the guest's blkif ring.
#![forbid(unsafe_code)]
