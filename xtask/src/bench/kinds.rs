//! The kinds of servers, the roles of the sides of a line, and the aims of a line.

/// By what protocol a client reaches a server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Front {
    Nbd,
    Vhost,
}

/// How qemu-storage-daemon does its I/O.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Aio {
    Uring,
    Native,
    Threads,
    /// No I/O at all: reads leave the guest's memory as it is.
    NoFill,
}

/// The kinds of servers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Spile(Front),
    /// qemu-nbd.
    Qemu,
    Nbdkit,
    /// qemu-storage-daemon, over vhost-user-blk.
    Daemon(Aio),
    /// No server: fio does its I/O on the file itself.
    Fio,
}

impl Kind {
    /// The program that has to be installed; none for our own.
    pub fn program(self) -> Option<&'static str> {
        match self {
            Kind::Spile(_) => None,
            Kind::Qemu => Some("qemu-nbd"),
            Kind::Nbdkit => Some("nbdkit"),
            Kind::Daemon(_) => Some("qemu-storage-daemon"),
            Kind::Fio => Some("fio"),
        }
    }

    /// The protocol that it serves, or that a client uses in its place.
    pub fn front(self) -> Front {
        match self {
            Kind::Spile(front) => front,
            Kind::Daemon(_) => Front::Vhost,
            Kind::Qemu | Kind::Nbdkit | Kind::Fio => Front::Nbd,
        }
    }
}

/// The role of a side in its group. The first side of a group is Spile's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// A competitor, or what else the first side is set beside: the ratio is to the best of them.
    Peer,
    /// The medium itself, by a program without a server.
    Bare,
    /// Spile on a raw file, where the first side is something richer.
    Raw,
    /// Spile with io_uring, where the first side has another engine.
    Uring,
    /// An earlier build of Spile.
    Before,
    /// The side is shown, and in no ratio.
    Shown,
}

impl Role {
    /// The roles that ratios are to, and how their columns are called.
    pub const COMPARED: [(Role, &str); 5] = [
        (Role::Peer, "÷peer"),
        (Role::Bare, "÷bare"),
        (Role::Raw, "÷raw"),
        (Role::Uring, "÷uring"),
        (Role::Before, "÷before"),
    ];

    /// The role's name in an aim.
    pub fn name(self) -> &'static str {
        match self {
            Role::Peer => "the best peer",
            Role::Bare => "bare",
            Role::Raw => "our raw",
            Role::Uring => "our io_uring",
            Role::Before => "the build before",
            Role::Shown => "the side shown",
        }
    }
}

/// An aim for the first side of a line.
#[derive(Clone, Copy, Debug)]
pub enum Aim {
    /// Its rate, at least so many times the best in that role.
    RateOf(Role, f64),
    /// Its CPU time for a request, at most so many times the least in that role.
    CpuOf(Role, f64),
    /// Its median latency, at most so many times the least in that role.
    P50Of(Role, f64),
    /// Microseconds of CPU time for a request.
    CpuAtMost(f64),
    /// Microseconds of median latency.
    P50AtMost(f64),
}
