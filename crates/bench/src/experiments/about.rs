//! What each experiment shows, which article it repeats, and what that article found: one table for `--help`, for the text that
//! an experiment prints, and for reports.

/// What is told of an experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct About {
    /// Its name, as `spile bench NAME` takes it.
    pub name: &'static str,
    /// What it shows, in one sentence.
    pub sentence: &'static str,
    /// The article that it repeats, with its year; empty when no article did this before.
    pub article: &'static str,
    /// What the article found, in numbers; empty when there is no article.
    pub found: &'static str,
}

/// All experiments, in the order in which `spile bench all` runs them.
pub const EXPERIMENTS: &[About] = &[
    About {
        name: "depth",
        sentence: "How many requests wait at each layer while a guest keeps 1 to 64 in flight, and what an averaging tool such as \
                   iostat makes of it.",
        article: "Average Queue Size and Storage IO Metrics (2014)",
        found: "4 KiB sequential reads at depth 1, about 5 400 a second at each layer: an average queue of 0.96 in the guest, 0.71 at \
                tapdisk3 and 0.61 at the host's device; the difference is the time that requests spend between the layers.",
    },
    About {
        name: "shape",
        sentence: "Whether a guest whose large reads are split into parts is faster than the bare store, which is asked for them whole.",
        article: "When Virtualised Storage is Faster than Bare Metal (2015)",
        found: "512 KiB in flight on an NVMe disk: one request just under 1 GB/s, 64 requests of 8 KiB about twice that. Splitting suits \
                solid-state disks; merging suits spinning ones.",
    },
    About {
        name: "layers",
        sentence: "What a file on a file system costs beside a partition and a logical volume, for each block size, bare and through \
                   each front.",
        article: "Giacobbi, Vardanega: Measuring I/O Performance in Xen Paravirtualization Virtual Machines (CLOSER 2011)",
        found: "A guest's partition was as fast as the bare disk (102 MiB/s) from 128 KiB blocks on, LVM cost nothing more, and a file \
                cost much. Direct I/O needed blocks of 64 KiB to reach the disk's speed: 3.5 MiB/s at 512 bytes, 25 at 4 KiB.",
    },
    About {
        name: "geometry",
        sentence: "Whether the speed of a device or file depends on the address that is read.",
        article: "Giacobbi, Vardanega: Measuring I/O Performance in Xen Paravirtualization Virtual Machines (CLOSER 2011)",
        found: "1 GiB read every 5 GiB of a 7 200 rpm disk: much the same speed at all logical addresses that were used.",
    },
    About {
        name: "warmup",
        sentence: "How much has to be moved until a figure of throughput can be trusted.",
        article: "Giacobbi, Vardanega: Measuring I/O Performance in Xen Paravirtualization Virtual Machines (CLOSER 2011)",
        found: "In blocks of 1 MiB, direct reads went from 26.8 MiB/s for 1 MiB over 109.6 for 4 MiB to 102.3 for 1 GiB, and then stayed \
                within 1 %; buffered writes rose from 37 to 97 MiB/s at 1 GiB and 101 at 4 GiB.",
    },
    About {
        name: "density",
        sentence: "What hundreds of idle guests cost the host: what wakes the server and why, its processor time, its memory and its \
                   threads.",
        article: "VM Density and Project Pulsar (2013)",
        found: "One idle Windows 7 guest woke its emulator about 3 450 times by timers, 3 000 by reads and 1 600 by writes in each 30 s; \
                after the changes the rows were zero, and 500 guests left the host's load practically at zero.",
    },
    About {
        name: "paths",
        sentence: "Where the time of one request goes on each way to a disk, by the size of the request.",
        article: "Project Karcygwins and Virtualised Storage Performance (2013)",
        found: "Small requests paid most; an array of SSDs gave 900 MB/s to dom0 at 2 MiB and 300 through user space. Mapping and \
                unmapping of grants took most of the time, and with persistent grants the copy in the guest did.",
    },
    About {
        name: "aggregate",
        sentence: "How much many guests with many disks move together, on each way to a guest's memory.",
        article: "XenServer Storage Performance Improvements and Tapdisk3 (2014)",
        found: "Ten guests with nine disks each: tapdisk2 never came above 4 GB/s, tapdisk3 near 8 GB/s writing and 10 GB/s reading, up to \
                100 % and 150 % more.",
    },
    About {
        name: "exchange",
        sentence: "What a guest feels when the images of its disk are exchanged while it writes.",
        article: "",
        found: "",
    },
    About {
        name: "snapshot",
        sentence: "How much longer a guest's longest request is when snapshots of its disks are taken, whatever the number of disks, the \
                   length of the chain and the slowest request in flight.",
        article: "",
        found: "",
    },
    About {
        name: "merge",
        sentence: "What a guest feels while images of its disk's chain are merged or its disk is flattened, how fast that is, how much \
                   space it takes, and whether it ends while the guest writes nearly as fast as the disk can.",
        article: "",
        found: "",
    },
    About {
        name: "crowd",
        sentence: "What hundreds of idle disks cost a busy one in the same server.",
        article: "",
        found: "",
    },
    About {
        name: "hung",
        sentence: "What a disk feels when another disk's store on the same worker stops answering.",
        article: "",
        found: "",
    },
    About {
        name: "limit",
        sentence: "Whether limits hold their rates on mixed sizes, change at once, share a group's rate in halves, and cost nobody else \
                   anything.",
        article: "",
        found: "",
    },
    About {
        name: "checkpoint",
        sentence: "What it costs a guest's writes that changed blocks are tracked: writes a second and processor time, with a checkpoint and \
                   without.",
        article: "",
        found: "",
    },
    About {
        name: "promises",
        sentence: "Whether what is promised of the life of a disk is kept: clones, deletes, merges, mirrors, moves, cut links, backups, changes and \
                   sparse copies, each promise beside what was seen.",
        article: "",
        found: "",
    },
];

/// What is told of the experiment of that name.
pub fn about(experiment: &str) -> Option<&'static About> {
    EXPERIMENTS.iter().find(|about| about.name == experiment)
}

impl About {
    /// What is told, in paragraphs whose lines have at most `columns` characters.
    pub fn to_text(&self, columns: usize) -> String {
        let mut paragraphs = vec![wrap(self.sentence, columns)];
        if !self.article.is_empty() {
            paragraphs.push(wrap(&format!("It repeats: {}.", self.article), columns));
            paragraphs.push(wrap(&format!("Found there: {}", self.found), columns));
        }
        paragraphs.join("\n")
    }
}

/// `text` in lines of at most `columns` characters, broken at its spaces.
fn wrap(text: &str, columns: usize) -> String {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= columns => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_experiment_is_told_of_once() {
        for one in EXPERIMENTS {
            assert_eq!(about(one.name), Some(one));
            assert!(one.sentence.ends_with('.'), "{}", one.name);
            assert_eq!(one.article.is_empty(), one.found.is_empty(), "{}", one.name);
        }
        assert_eq!(about("everything"), None);
    }

    #[test]
    fn no_line_is_longer_than_it_may_be() {
        for one in EXPERIMENTS {
            assert!(one.to_text(60).lines().all(|line| line.chars().count() <= 60), "{}", one.name);
        }
        assert_eq!(wrap("a bb  ccc dddd", 6), "a bb\nccc\ndddd");
    }
}
