//! The queues of the helper threads: which job is done next. There are no threads here and no waiting, only the choice.
//!
//! Each file has a *lane*, and each file system (or block device) has a *group* of lanes. A store that does not answer
//! keeps every thread that works for it, so the number of its threads is bounded at three levels:
//!
//! - **In a lane**, each class of jobs has a queue and places of its own ([`Class`]). A sync, for example, never waits
//!   behind the same disk's storm of discards.
//! - **In a group**, each class has places, too. A hundred disks on one dead file server are one group.
//! - **In the pool**, a group may use at most half of the threads that the other groups leave over. So the first dead file
//!   system takes its places, each further one leaves something for the next, and there is room for a healthy one. A group that has no
//!   thread gets one in any case.
//!
//! Groups take turns, and lanes take turns within their group.

use std::collections::{HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Stat};
use slab::Slab;

/// The kinds of jobs that have queues and places of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    /// Cached writes. The kernel does those of one file one after the other, so one thread does them all. It also takes
    /// several at a time.
    CachedWrite,
    /// Other transfers, and what is as short: they run beside each other.
    Transfer,
    /// fallocate: discards and zeroing, which may come in storms and last long; opening and closing of files.
    Change,
    /// Syncs. A store has one at a time.
    Sync,
}

const CLASSES: [Class; 4] = [Class::CachedWrite, Class::Transfer, Class::Change, Class::Sync];

impl Class {
    /// The most threads of one lane: enough to keep a device busy.
    fn lane_places(self) -> usize {
        match self {
            Self::CachedWrite => 1,
            Self::Transfer => 32,
            Self::Change => 8,
            Self::Sync => 2,
        }
    }

    /// The most threads of one group.
    fn group_places(self) -> usize {
        match self {
            Self::CachedWrite | Self::Transfer => 64,
            Self::Change | Self::Sync => 32,
        }
    }

    /// The most jobs that one thread takes at a time.
    fn run_jobs(self) -> usize {
        if self == Self::CachedWrite { 16 } else { 1 }
    }
}

/// What a group belongs to.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Owner {
    /// A file system, by its device number.
    FileSystem(u64),
    /// A block device, by its own device number.
    Device(u64),
    /// The files in a folder, for operations on names. The file system of a name is not known before it is asked.
    Folder(PathBuf),
}

/// What a lane belongs to: a file of a group. Two descriptors of a file share its lane.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LaneKey {
    pub(crate) owner: Owner,
    pub(crate) inode: u64,
}

impl LaneKey {
    /// The key of files of which nothing can be found out.
    pub(crate) const UNKNOWN: Self = Self { owner: Owner::FileSystem(u64::MAX), inode: 0 };

    /// The key of the file or block device that `stat` describes.
    pub(crate) fn of_file(stat: &Stat) -> Self {
        let is_device = FileType::from_raw_mode(stat.st_mode).is_block_device();
        let owner = if is_device { Owner::Device(stat.st_rdev) } else { Owner::FileSystem(stat.st_dev) };
        Self { owner, inode: if is_device { 0 } else { stat.st_ino } }
    }

    /// The key for operations on the name `path`.
    pub(crate) fn of_name(path: &Path) -> Self {
        let owner = Owner::Folder(path.parent().unwrap_or(path).to_owned());
        let mut hasher = DefaultHasher::new();
        path.file_name().hash(&mut hasher);
        Self { owner, inode: hasher.finish() }
    }
}

/// All lanes with their jobs.
pub(crate) struct Lanes<J> {
    lanes: Slab<Lane<J>>,
    groups: Slab<Group>,
    lane_of: HashMap<LaneKey, usize>,
    group_of: HashMap<Owner, usize>,
    /// The groups with jobs for which their lanes have places, in the order of their turns.
    ready: VecDeque<usize>,
    /// The threads that work now.
    busy: usize,
}

struct Lane<J> {
    key: LaneKey,
    group: usize,
    /// How many handles name this lane.
    users: usize,
    queues: [Queue<J>; CLASSES.len()],
}

struct Queue<J> {
    jobs: VecDeque<J>,
    /// The threads that work on jobs of this queue.
    busy: usize,
    /// True while the queue is in its group's list.
    is_listed: bool,
}

#[derive(Default)]
struct Group {
    lanes: usize,
    busy: [usize; CLASSES.len()],
    /// For each class the lanes that have jobs and a place for one more thread, in the order of their turns.
    listed: [VecDeque<usize>; CLASSES.len()],
    /// The class whose turn is next.
    turn: usize,
    is_ready: bool,
}

/// The place of a thread in a lane: what it gives back when its jobs are done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    lane: usize,
    class: Class,
}

impl<J> Default for Lanes<J> {
    fn default() -> Self {
        let (lane_of, group_of) = (HashMap::new(), HashMap::new());
        Self { lanes: Slab::new(), groups: Slab::new(), lane_of, group_of, ready: VecDeque::new(), busy: 0 }
    }
}

impl<J> Lanes<J> {
    /// The lane of `key`, for one more user.
    pub(crate) fn enter(&mut self, key: &LaneKey) -> usize {
        if let Some(lane) = self.lane_of.get(key) {
            self.lanes[*lane].users += 1;
            return *lane;
        }
        let group = *self.group_of.entry(key.owner.clone()).or_insert_with(|| self.groups.insert(Group::default()));
        self.groups[group].lanes += 1;
        let queues = CLASSES.map(|_| Queue { jobs: VecDeque::new(), busy: 0, is_listed: false });
        let lane = self.lanes.insert(Lane { key: key.clone(), group, users: 1, queues });
        self.lane_of.insert(key.clone(), lane);
        lane
    }

    /// The number of the file system or device of a lane. No other has it until the last of its lanes is gone.
    pub(crate) fn group_of(&self, lane: usize) -> usize {
        self.lanes[lane].group
    }

    /// A user has gone. Its jobs are done all the same.
    pub(crate) fn leave(&mut self, lane: usize) {
        self.lanes[lane].users -= 1;
        self.remove_unused(lane);
    }

    fn remove_unused(&mut self, lane: usize) {
        let found = &self.lanes[lane];
        if found.users > 0 || found.queues.iter().any(|queue| queue.busy > 0 || !queue.jobs.is_empty()) {
            return;
        }
        let gone = self.lanes.remove(lane);
        self.lane_of.remove(&gone.key);
        let group = &mut self.groups[gone.group];
        group.lanes -= 1;
        if group.lanes == 0 {
            let index = gone.group;
            self.ready.retain(|other| *other != index);
            self.groups.remove(index);
            self.group_of.remove(&gone.key.owner);
        }
    }

    /// Queues a job.
    pub(crate) fn push(&mut self, lane: usize, class: Class, job: J) {
        self.lanes[lane].queues[class as usize].jobs.push_back(job);
        self.list(lane, class);
    }

    /// Enters a queue into its group's list if it has jobs and a place.
    fn list(&mut self, lane: usize, class: Class) {
        let found = &mut self.lanes[lane];
        let queue = &mut found.queues[class as usize];
        if queue.is_listed || queue.jobs.is_empty() || queue.busy >= class.lane_places() {
            return;
        }
        queue.is_listed = true;
        let group = &mut self.groups[found.group];
        group.listed[class as usize].push_back(lane);
        if !std::mem::replace(&mut group.is_ready, true) {
            self.ready.push_back(found.group);
        }
    }

    /// Takes the next jobs into `run`, for one thread. The groups have shares of `threads`. `None` when no job has a place. The jobs are of
    /// one lane and one class.
    pub(crate) fn take(&mut self, threads: usize, run: &mut VecDeque<J>) -> Option<Place> {
        let (index, class) = self.choose(threads)?;
        self.ready.rotate_left(1);
        let group = &mut self.groups[index];
        group.turn = (class as usize + 1) % CLASSES.len();
        group.busy[class as usize] += 1;
        self.busy += 1;
        let lane = group.listed[class as usize].pop_front()?;
        let queue = &mut self.lanes[lane].queues[class as usize];
        queue.is_listed = false;
        queue.busy += 1;
        let count = queue.jobs.len().min(class.run_jobs());
        run.extend(queue.jobs.drain(..count));
        self.list(lane, class);
        Some(Place { lane, class })
    }

    /// True when a further thread would find a job.
    pub(crate) fn has_work(&mut self, threads: usize) -> bool {
        self.choose(threads).is_some()
    }

    /// The group and class whose turn it is. That group is the first one in the order then.
    fn choose(&mut self, threads: usize) -> Option<(usize, Class)> {
        for _ in 0..self.ready.len() {
            let index = *self.ready.front()?;
            if let Some(class) = self.class_of(index, threads) {
                return Some((index, class));
            }
            self.ready.pop_front();
            match self.groups[index].listed.iter().all(VecDeque::is_empty) {
                true => self.groups[index].is_ready = false,
                false => self.ready.push_back(index),
            }
        }
        None
    }

    /// The next class of a group that has a job and a place for it.
    fn class_of(&self, index: usize, threads: usize) -> Option<Class> {
        let group = &self.groups[index];
        let own: usize = group.busy.iter().sum();
        let left = threads.saturating_sub(self.busy - own);
        if own >= (left / 2).max(1) {
            return None;
        }
        let turns = (0..CLASSES.len()).map(|step| CLASSES[(group.turn + step) % CLASSES.len()]);
        let has_place = |class: &Class| {
            !group.listed[*class as usize].is_empty() && group.busy[*class as usize] < class.group_places()
        };
        turns.into_iter().find(has_place)
    }

    /// A thread has done its jobs.
    pub(crate) fn give_back(&mut self, place: Place) {
        let lane = &mut self.lanes[place.lane];
        lane.queues[place.class as usize].busy -= 1;
        self.groups[lane.group].busy[place.class as usize] -= 1;
        self.busy -= 1;
        self.list(place.lane, place.class);
        self.remove_unused(place.lane);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const THREADS: usize = 512;

    fn key(device: u64, inode: u64) -> LaneKey {
        LaneKey { owner: Owner::FileSystem(device), inode }
    }

    /// Takes until nothing has a place, for stores that never answer. Returns the jobs.
    fn take_all(lanes: &mut Lanes<u32>, threads: usize) -> Vec<u32> {
        let mut taken = VecDeque::new();
        while lanes.take(threads, &mut taken).is_some() {}
        taken.into()
    }

    #[test]
    fn a_sync_and_a_write_pass_a_storm_of_discards() {
        let mut lanes = Lanes::default();
        let lane = lanes.enter(&key(1, 1));
        (0..1000).for_each(|number| lanes.push(lane, Class::Change, number));
        assert_eq!(take_all(&mut lanes, THREADS).len(), Class::Change.lane_places());
        lanes.push(lane, Class::Sync, 2000);
        lanes.push(lane, Class::Transfer, 2001);
        assert_eq!(take_all(&mut lanes, THREADS), [2000, 2001]);
    }

    #[test]
    fn lanes_take_turns() {
        let mut lanes = Lanes::default();
        let [a, b, other] = [key(1, 1), key(1, 2), key(2, 1)].map(|key| lanes.enter(&key));
        (0..10).for_each(|number| lanes.push(a, Class::Transfer, number));
        (10..12).for_each(|number| lanes.push(b, Class::Transfer, number));
        lanes.push(other, Class::Transfer, 20);
        assert_eq!(take_all(&mut lanes, THREADS)[..6], [0, 20, 10, 1, 11, 2]);
    }

    #[test]
    fn a_dead_file_system_with_many_disks_leaves_threads_for_others() {
        let mut lanes = Lanes::default();
        for inode in 0..100 {
            let lane = lanes.enter(&key(1, inode));
            (0..100).for_each(|_| lanes.push(lane, Class::Transfer, 1));
            (0..100).for_each(|_| lanes.push(lane, Class::Sync, 1));
        }
        let most = Class::Transfer.group_places() + Class::Sync.group_places();
        assert_eq!(take_all(&mut lanes, THREADS).len(), most);
        let healthy = lanes.enter(&key(2, 1));
        lanes.push(healthy, Class::Transfer, 2);
        assert_eq!(take_all(&mut lanes, THREADS), [2]);
    }

    #[test]
    fn each_of_many_dead_stores_leaves_threads_for_the_next() {
        for threads in [8, 64, THREADS] {
            let mut lanes = Lanes::default();
            // The first one takes a half, the next a half of what is left.
            for device in 1..=3 {
                let lane = lanes.enter(&key(device, 1));
                (0..1000).for_each(|number| lanes.push(lane, CLASSES[number % CLASSES.len()], 1));
                assert!(!take_all(&mut lanes, threads).is_empty());
            }
            let healthy = lanes.enter(&key(9, 1));
            lanes.push(healthy, Class::Sync, 2);
            assert!(lanes.busy < threads, "{} of {threads}", lanes.busy);
            assert_eq!(take_all(&mut lanes, threads), [2]);
        }
    }

    #[test]
    fn cached_writes_of_a_file_go_to_one_thread_in_order() {
        let (mut lanes, mut run) = (Lanes::default(), VecDeque::new());
        let lane = lanes.enter(&key(1, 1));
        (0..20).for_each(|number| lanes.push(lane, Class::CachedWrite, number));
        let place = lanes.take(THREADS, &mut run).unwrap();
        assert!(run.drain(..).eq(0..16) && !lanes.has_work(THREADS));
        lanes.give_back(place);
        let place = lanes.take(THREADS, &mut run).unwrap();
        assert!(run.drain(..).eq(16..20));
        lanes.give_back(place);
    }

    #[test]
    fn a_lane_lasts_until_its_last_job() {
        let (mut lanes, mut run) = (Lanes::default(), VecDeque::new());
        let lane = lanes.enter(&key(1, 1));
        assert_eq!(lanes.enter(&key(1, 1)), lane, "two descriptors of a file have one lane");
        lanes.push(lane, Class::Transfer, 1);
        lanes.leave(lane);
        lanes.leave(lane);
        let place = lanes.take(THREADS, &mut run).unwrap();
        assert_eq!((lanes.lanes.len(), lanes.groups.len()), (1, 1));
        lanes.give_back(place);
        assert!(lanes.lanes.is_empty() && lanes.groups.is_empty() && lanes.ready.is_empty());
        assert!(lanes.lane_of.is_empty() && lanes.group_of.is_empty() && lanes.busy == 0);
    }
}
