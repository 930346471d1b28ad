//! A front end of the worst kind, on a real Xen: a program in the first domain that grants pages of its own, makes event
//! channels, writes xenstore's keys, and does with them what no driver does.
//!
//!     hostile_front BACKEND-PATH CASE…
//!
//! The back end's folder has to be there, with a key `frontend` that the kernel's own front end does not look at. Each case
//! begins a connection of its own, and ends with one that keeps to the rules, moves data and finds them again. It prints
//! a line for each case that went as it should, and panics at the first that did not.
//!
//! The cases are those in which Xen itself has a part: grants, maps, copies, event channels and a xenstored. What a back end
//! decides by looking at bytes (rings, requests, keys) is tested on the Xen of ordinary processes, in `spile-front-blkif`.
//!
//! In one domain all share a grant table: an entry that was freed may be the kernel's next. The cases that use such entries
//! (`freed`, `revoked`, `work`) are for times when no other disk of the domain is at work.

mod front;
mod grants;
mod queue;
mod ring;
mod store;

use front::Front;

/// A case's name, and what it does.
type Case = (&'static str, fn(&mut Front));

const CASES: [Case; 10] = [
    ("good", |_| {}),
    ("kicks", ring::kicks),
    ("grants", grants::bad),
    ("readonly", grants::readonly),
    ("freed", grants::freed),
    ("revoked", grants::revoked),
    ("ring-grants", grants::of_rings),
    ("ring-freed", grants::ring_freed),
    ("states", store::states),
    ("work", ring::work),
];

fn main() {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().expect("hostile_front BACKEND-PATH CASE…");
    let mut front = Front::open(&path);
    for name in arguments {
        let (_, case) = CASES.iter().find(|(known, _)| *known == name).unwrap_or_else(|| panic!("no case {name}"));
        case(&mut front);
        front.assert_well();
        println!("{name}: as it should");
    }
}
