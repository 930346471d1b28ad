//! What can be measured: sides, lines, and groups of lines. The modules `nbd` and `vhost` list them.

use super::Plan;
use super::kinds::{Aim, Kind, Role};

/// How a server holds the disk's bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cache {
    /// In the page cache.
    Page,
    /// By O_DIRECT.
    Direct,
}

/// The state of an image before a point.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// Every byte written once; made once and used by all.
    Full,
    /// New and empty before each point.
    Fresh,
    /// The server and image of the side before, as that side left them.
    Again,
    /// A VHD chain of that many files, every block partly written in every child.
    Chain(usize),
    /// A new child of a full image, made by the program that serves it.
    Child,
    /// A large qcow2 with small clusters: each has its place, and nothing was written. Its tables are larger than the caches of the servers.
    Mapped,
}

/// A format, by the name that Spile's and QEMU's commands share or translate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Format {
    Raw,
    /// Made and served by Spile.
    Vhd,
    /// QEMU's own VHD.
    Vpc,
    Qcow2,
    /// No file: reads as zeroes, drops what is written.
    Null,
}

/// One server on one image.
#[derive(Clone)]
pub struct Side {
    /// Its column.
    pub name: &'static str,
    pub server: Kind,
    pub format: Format,
    pub cache: Cache,
    pub state: State,
    pub role: Role,
    /// More words for Spile's command line.
    pub options: &'static [&'static str],
    /// Cores that the server has, and the client as many others.
    pub cores: usize,
}

impl Side {
    /// Makes a peer on a full image.
    pub fn new(name: &'static str, server: Kind, format: Format, cache: Cache) -> Side {
        Side { name, server, format, cache, state: State::Full, role: Role::Peer, options: &[], cores: 1 }
    }

    /// Sets the state of the image.
    pub fn state(self, state: State) -> Side {
        Side { state, ..self }
    }

    /// Sets the role.
    pub fn role(self, role: Role) -> Side {
        Side { role, ..self }
    }

    /// Adds options for Spile.
    pub fn options(self, options: &'static [&'static str]) -> Side {
        Side { options, ..self }
    }

    /// True when Spile serves it.
    pub fn is_ours(&self) -> bool {
        matches!(self.server, Kind::Spile(_))
    }

    /// Sets the number of cores for the server.
    pub fn cores(self, cores: usize) -> Side {
        Side { cores, ..self }
    }
}

/// Where the data of a client lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Memory {
    /// In one piece for each request, in pages of 4 KiB.
    Pages,
    /// Each 4 KiB somewhere else, as in a guest with small pages.
    Scattered,
    /// In pages of 2 MiB.
    Huge,
}

/// One load.
pub struct Line {
    /// As printed: pattern, size, depth, connections, and what is special about the client.
    pub name: String,
    pub pattern: &'static str,
    pub block: &'static str,
    pub depth: u32,
    pub memory: Memory,
    connections: u32,
    /// Ends after so many requests instead of after the plan's time.
    pub requests: Option<u64>,
    /// The client looks for answers all the time instead of sleeping.
    polling: bool,
    /// Requests a second, instead of as many as go.
    rate: Option<u32>,
    /// Half of the requests are answered after so long: worth a figure of its own.
    pub shows_p50: bool,
    /// The aims of the first side.
    pub aims: Vec<Aim>,
}

/// Lines that compare the same sides. The first side is Spile's; ratios are its to the others', by their roles.
pub struct Group {
    pub name: &'static str,
    pub about: &'static str,
    pub sides: Vec<Side>,
    pub lines: Vec<Line>,
}

impl Line {
    pub fn new(pattern: &'static str, block: &'static str, depth: u32, connections: u32) -> Line {
        Line {
            name: format!("{pattern} {block} depth {depth} × {connections}"),
            pattern,
            block,
            depth,
            memory: Memory::Pages,
            connections,
            requests: None,
            polling: false,
            rate: None,
            shows_p50: false,
            aims: Vec::new(),
        }
    }

    /// The same number of requests, and by the same seed the same ones, for every side.
    pub fn requests(self, plan: &Plan, count: u64) -> Line {
        let count = if plan.quick { count / 100 } else { count };
        Line { requests: Some(count), ..self }
    }

    /// Sets where the data of the client lie.
    pub fn memory(mut self, memory: Memory) -> Line {
        self.name += match memory {
            Memory::Pages => ", in one piece",
            Memory::Scattered => ", in 4k pieces",
            Memory::Huge => ", huge pages",
        };
        Line { memory, ..self }
    }

    /// Lets the client poll.
    pub fn polling(mut self) -> Line {
        self.name += ", polling client";
        Line { polling: true, ..self }
    }

    /// Sets the rate of the client, in requests a second.
    pub fn rate(mut self, requests_per_s: u32) -> Line {
        self.name += &format!(", {requests_per_s}/s");
        Line { rate: Some(requests_per_s), ..self }
    }

    /// Shows the median of the latencies too.
    pub fn p50(self) -> Line {
        Line { shows_p50: true, ..self }
    }

    /// Adds an aim.
    pub fn aim(mut self, aim: Aim) -> Line {
        self.aims.push(aim);
        self
    }

    /// True when `--only` selects the line.
    pub fn is_asked_for(&self, plan: &Plan, group: &Group) -> bool {
        format!("{}/{}", group.name, self.name).contains(&plan.only)
    }

    /// Requests move whole pages or more: bytes a second say more than requests a second.
    pub fn is_bandwidth(&self) -> bool {
        self.block != "4k"
    }

    /// True when its requests are writes.
    pub fn writes(&self) -> bool {
        self.pattern.ends_with("write")
    }

    /// How much all its requests move; `None` when it ends by time.
    pub fn total_bytes(&self) -> Option<u64> {
        self.requests.map(|requests| requests * (self.block_kib() << 10))
    }

    fn block_kib(&self) -> u64 {
        match self.block.split_at(self.block.len() - 1) {
            (number, "m") => number.parse().unwrap_or(1) * 1024,
            (number, _) => number.parse().unwrap_or(4),
        }
    }

    /// How many huge pages the client needs.
    pub fn huge_pages(&self) -> u64 {
        // Beside the data there are rings and descriptors.
        const BESIDE: u64 = 4;
        match self.memory {
            Memory::Huge => (u64::from(self.depth) * self.block_kib()).div_ceil(2048) + BESIDE,
            _ => 0,
        }
    }

    /// Milliseconds of load, when it does not end by requests.
    pub fn runtime_ms(plan: &Plan) -> u64 {
        (plan.point_s * 1000.0) as u64
    }

    /// The arguments of `spile load`.
    pub fn load_arguments(&self, plan: &Plan) -> Vec<String> {
        let (depth, connections) = (self.depth.to_string(), self.connections.to_string());
        let mut words = vec!["--rw", self.pattern, "--bs", self.block, "--depth", &depth];
        words.extend(["--connections", &connections]);
        words.extend(match self.memory {
            Memory::Pages => &[] as &[&str],
            Memory::Scattered => &["--segment", "4k"],
            Memory::Huge => &["--huge-pages"],
        });
        words.extend(self.polling.then_some("--poll"));
        let mut words: Vec<String> = words.into_iter().map(str::to_string).collect();
        words.extend(self.rate.into_iter().flat_map(|rate| ["--rate".to_string(), rate.to_string()]));
        words.extend(match self.requests {
            Some(count) => ["--ios".to_string(), count.to_string()],
            None => ["--runtime".to_string(), format!("{}ms", Line::runtime_ms(plan))],
        });
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_pages_are_counted_from_what_is_in_flight() {
        let line = |block, depth| Line::new("read", block, depth, 1);
        assert_eq!(line("1m", 8).huge_pages(), 0);
        assert_eq!(line("1m", 8).memory(Memory::Huge).huge_pages(), 8);
        assert_eq!(line("256k", 1).memory(Memory::Huge).huge_pages(), 5);
    }

    #[test]
    fn what_is_warmed_is_what_all_requests_move() {
        let line = |requests| Line { requests, ..Line::new("write", "64k", 8, 1) };
        assert_eq!(line(Some(16)).total_bytes(), Some(1 << 20));
        assert_eq!(line(None).total_bytes(), None);
    }
}
