//! The simulator finds what is broken on purpose, and nothing in the code as it is.

mod amend;
mod backup;
mod bitmaps;
mod changes;
mod dirty;
mod exchange;
mod found;
mod gc;
mod giving_up;
mod giving_up_qcow2;
mod hosts;
mod images;
mod inner;
mod merge;
mod motion;
mod moves;
mod qcow2;
mod rebase;
mod receive;
mod resize;
mod resize_vhd;
mod told;
mod toys;
mod vhd_rules;
