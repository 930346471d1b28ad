//! [`World`]: the simulated host. It holds the files, the operations in flight, the clock and all chance.
//!
//! An operation is issued, takes effect in the page cache (wholly, or in pieces at different steps), and is
//! answered: three moments that the seed spreads over the steps of the run, so that operations in flight overtake each other
//! in every way. [`World::kill`] ends the process between any two steps, [`World::cut_power`] the host.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Waker;

use spile_core::{Error, ErrorKind, Files as _, OpenMode, Result};
use spile_image::formats::vhd::{self, CreateParams};

use crate::exec::end_in;
use crate::faults::{Faults, Harm, Sabotage};
use crate::file::{Change, Effect, SimFile};
use crate::names::{self, Names};
use crate::op::{Kind, Op, Stage};
use crate::oracle::Crash;
use crate::pages::{PAGE, Pages};
use crate::rng::{Rng, mix};
use crate::store::{SimEnv, SimFiles};

/// What the simulated host is made of.
#[derive(Clone, Debug)]
pub struct Hardware {
    /// Alignment in bytes of direct operations: 512 or 4096 (1: any). Also what a write tears at.
    pub align_bytes: u32,
    /// Holes can be punched.
    pub punches: bool,
    /// Files are block devices: they do not grow by writes, and what was never written is anything.
    pub devices: bool,
}

/// The simulated host; clones are handles to the same one.
#[derive(Clone)]
pub struct World {
    state: Arc<Mutex<State>>,
}

pub(crate) struct State {
    pub hardware: Hardware,
    pub files: Vec<SimFile>,
    pub names: Names,
    pub life: u64,
    pub boot: u64,
    pub clock_ms: u64,
    pub env_rng: Rng,
    pub results: BTreeMap<u64, Result<()>>,
    ops: Vec<Op>,
    /// Until which step the operations on a file stand still, by the file's number.
    hung: BTreeMap<usize, u64>,
    next_op: u64,
    step: u64,
    rng: Rng,
    crash_rng: Rng,
    fault_rng: Rng,
    pub faults: Faults,
    faults_fired: u64,
    pub sabotage: Sabotage,
    /// The numbers of the reads that were answered and are not done ([`Sabotage::SlowReaders`]), and how many there were.
    pub slow_reads: BTreeSet<u64>,
    pub slow_begun: u64,
    syncs: u64,
    ends_behind: Option<Behind>,
    trace: Trace,
}

/// The record of a run: its hash, and its lines when they are asked for.
#[derive(Default)]
struct Trace {
    hash: u64,
    lines: Option<Vec<String>>,
}

/// A change of names, close behind which a run ends.
#[derive(Clone, Copy)]
pub(crate) struct Behind {
    /// Which changes count.
    pub is_it: fn(&names::Change) -> bool,
    /// So many of them come before it.
    pub left: u64,
    /// How many steps behind it.
    pub steps: u64,
}

impl State {
    /// Names change.
    pub fn note_change(&mut self, change: &names::Change) {
        match &mut self.ends_behind {
            Some(Behind { is_it, left: 0, steps }) if is_it(change) => end_in(*steps),
            Some(Behind { is_it, left, .. }) if is_it(change) => return *left -= 1,
            _ => return,
        }
        self.ends_behind = None;
    }
}

impl Trace {
    fn note(&mut self, what: &str, numbers: [u64; 3], text: impl FnOnce() -> String) {
        for byte in what.bytes() {
            self.hash = self.hash.wrapping_mul(0x100_0000_01B3) ^ u64::from(byte);
        }
        self.hash = numbers.iter().fold(self.hash, |hash, number| mix(hash ^ number));
        if let Some(lines) = &mut self.lines {
            lines.push(text());
        }
    }
}

impl World {
    /// A host in which `seed` decides everything.
    pub fn new(seed: u64, hardware: Hardware) -> Self {
        let root = Rng::new(seed);
        let state = State {
            hardware,
            files: Vec::new(),
            names: Names::default(),
            life: 0,
            boot: 0,
            clock_ms: 1_700_000_000_000,
            env_rng: root.split(1),
            results: BTreeMap::new(),
            ops: Vec::new(),
            hung: BTreeMap::new(),
            next_op: 0,
            step: 0,
            rng: root.split(2),
            crash_rng: root.split(3),
            fault_rng: root.split(4),
            faults: Faults::default(),
            faults_fired: 0,
            sabotage: Sabotage::None,
            slow_reads: BTreeSet::new(),
            slow_begun: 0,
            syncs: 0,
            ends_behind: None,
            trace: Trace::default(),
        };
        Self { state: Arc::new(Mutex::new(state)) }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        // A panic in the code under test is a finding, not a reason to stop looking at the world.
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The files as the process that lives now sees them.
    pub fn files(&self) -> SimFiles {
        SimFiles::new(self.clone())
    }

    /// The clock, randomness and boot of this host.
    pub fn env(&self) -> Arc<SimEnv> {
        Arc::new(SimEnv::new(self.clone()))
    }

    /// Chooses the faults from here on.
    pub fn set_faults(&self, faults: Faults) {
        self.lock().faults = faults;
    }

    /// How many faults have been injected since the world began.
    pub fn faults_fired(&self) -> u64 {
        self.lock().faults_fired
    }

    /// Something has failed that is no operation of this host.
    pub(crate) fn count_fault(&self) {
        self.lock().faults_fired += 1;
    }

    /// How many reads were answered long before they are done: see [`Sabotage::SlowReaders`].
    pub(crate) fn slow_begun(&self) -> u64 {
        self.lock().slow_begun
    }

    /// One of the slow reads of these numbers is not done.
    pub(crate) fn has_slow_reads(&self, numbers: Range<u64>) -> bool {
        self.lock().slow_reads.range(numbers).next().is_some()
    }

    /// Somebody else on this host has written these bytes to the file at `path`, durably.
    pub(crate) fn poke(&self, path: &Path, offset: u64, bytes: &[u8]) {
        let mut state = self.lock();
        if let Some(file) = state.names.get(path) {
            state.files[file].poke(offset, bytes);
        }
    }

    /// Has one of the files, chosen by `choice`, hang: for so many steps no operation on it moves on.
    pub fn hang(&self, choice: u64, steps: u64) {
        let mut state = self.lock();
        let file = (choice % state.files.len() as u64) as usize;
        let until = state.step + steps;
        state.note("hang", [file as u64, until, 0]);
        state.hung.insert(file, until);
        state.ops.iter_mut().filter(|op| op.file == file).for_each(|op| op.due = op.due.max(until));
    }

    /// Breaks a promise of the store from here on.
    pub fn set_sabotage(&self, sabotage: Sabotage) {
        self.lock().sabotage = sabotage;
    }

    /// Keeps the lines of the trace from here on.
    pub fn keep_trace(&self) {
        self.lock().trace.lines.get_or_insert_default();
    }

    /// The lines kept so far.
    pub fn trace(&self) -> Vec<String> {
        self.lock().trace.lines.clone().unwrap_or_default()
    }

    /// A number that two runs share only when everything happened in them alike.
    pub fn trace_hash(&self) -> u64 {
        self.lock().trace.hash
    }

    /// Adds an event of the run to the trace.
    pub fn note(&self, what: &str, numbers: [u64; 3]) {
        self.lock().note(what, numbers);
    }

    /// Puts a file with this content there, durable.
    pub fn install(&self, path: impl Into<PathBuf>, content: &[u8]) {
        let mut pages = Pages::default();
        pages.write(0, content);
        self.lock().add_file(path.into(), SimFile::durable(pages));
    }

    /// Puts an empty file of `len_bytes` there, durable.
    pub fn install_empty(&self, path: impl Into<PathBuf>, len_bytes: u64) {
        let mut pages = Pages::default();
        pages.set_len(len_bytes);
        self.lock().add_file(path.into(), SimFile::durable(pages));
    }

    /// Puts an empty VHD of these properties there, durable. Its parent, if it has one, is there.
    ///
    /// # Errors
    /// Properties that cannot be.
    pub(crate) async fn install_vhd(&self, path: &Path, params: &CreateParams) -> Result<()> {
        self.install_empty(path, 0);
        let store = self.files().open(&path.into(), OpenMode::ReadWrite).await?;
        vhd::create(&store, &*self.env(), params).await?;
        self.settle(path);
        Ok(())
    }

    /// Puts a device of `len_bytes` there that holds somebody's old bytes. It is longer each time that somebody asks whether it is, up to `grows_to`.
    pub fn install_device(&self, path: impl Into<PathBuf>, len_bytes: u64, grows_to: u64) {
        let file = SimFile::growing(Pages::old_bytes(len_bytes), grows_to);
        self.lock().add_file(path.into(), file);
    }

    /// What the host is made of.
    pub fn hardware(&self) -> Hardware {
        self.lock().hardware.clone()
    }

    /// What the file shows now.
    pub fn view(&self, path: &Path) -> Option<Pages> {
        let state = self.lock();
        state.names.get(path).map(|at| state.files[at].view.clone())
    }

    /// The number of the file at `path`: files are counted from 0, in the order in which they were made.
    pub fn file_number(&self, path: &Path) -> Option<usize> {
        self.lock().names.get(path)
    }

    /// All names of files, in their order.
    pub fn names(&self) -> Vec<PathBuf> {
        self.lock().names.all().map(|(path, _)| path.clone()).collect()
    }

    /// Has the run end behind this change of names; `None`: as it would without.
    pub(crate) fn end_behind(&self, change: Option<Behind>) {
        self.lock().ends_behind = change;
    }

    /// Makes everything in the file at `path` durable. Nothing may be in flight.
    pub fn settle(&self, path: &Path) {
        let mut state = self.lock();
        let State { files, names, rng, .. } = &mut *state;
        if let Some(file) = names.get(path) {
            files[file].sync(rng, |_| false, &[]);
        }
    }

    /// The death of the process: operations in flight take effect wholly, partly or not; the page cache stays.
    pub fn kill(&self) {
        self.lock().kill("kill");
    }

    /// A power cut: as [`World::kill`], and of what was not synced a random part is lost.
    pub fn cut_power(&self) {
        let mut state = self.lock();
        state.kill("power cut");
        state.boot += 1;
        let granule = (*state.crash_rng.pick(&[512, PAGE])).max(state.hardware.align_bytes.into());
        let State { files, names, crash_rng, .. } = &mut *state;
        files.iter_mut().for_each(|file| file.power_cut(crash_rng, granule));
        names.power_cut(crash_rng);
    }

    /// The end of the process, or of the host; `None` is an end in order.
    pub fn end(&self, crash: Option<Crash>) {
        match crash {
            Some(Crash::PowerCut) => self.cut_power(),
            Some(Crash::Death) | None => self.kill(),
        }
    }

    /// The number of operations that can move on now. When all wait for the clock and `idle` says that nothing else can run, the
    /// clock moves forward.
    pub(crate) fn due(&self, idle: bool) -> usize {
        let mut state = self.lock();
        state.step += 1;
        state.clock_ms += 1;
        state.look_around();
        let count = state.ops.iter().filter(|op| op.due <= state.step).count();
        if count > 0 || !idle {
            return count;
        }
        if let Some(next) = state.ops.iter().map(|op| op.due).min() {
            state.clock_ms += next - state.step;
            state.step = next;
        }
        state.ops.iter().filter(|op| op.due <= state.step).count()
    }

    /// Moves the `index`th of the due operations on by one stage.
    pub(crate) fn advance(&self, index: usize) {
        let waker = self.lock().advance(index);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl State {
    pub fn note(&mut self, what: &str, numbers: [u64; 3]) {
        let (step, life) = (self.step, self.life);
        self.trace.note(what, numbers, || {
            let [a, b, c] = numbers;
            format!("{step:7} life {life} {what:<14} {a:#x} {b:#x} {c:#x}")
        });
    }

    pub fn add_file(&mut self, path: PathBuf, file: SimFile) -> usize {
        self.files.push(file);
        self.names.install(path, self.files.len() - 1);
        self.files.len() - 1
    }

    /// Locks the file for the process `owner`, which has the mode `mode` in mind. The owner 0 takes no notice of readers, nor do they of it.
    ///
    /// # Errors
    /// `Busy` when somebody writes it already, or another process has it open and one of the two writes.
    pub fn lock_file(&mut self, file: usize, mode: OpenMode, owner: u64) -> Result<()> {
        let file = &mut self.files[file];
        let busy = |what| Err(Error::new(ErrorKind::Busy, what));
        match mode {
            OpenMode::ReadOnly if owner == 0 => {}
            OpenMode::ReadOnly if file.locked && ![0, owner].contains(&file.writer) => return busy("open for writing"),
            OpenMode::ReadOnly => file.readers.push(owner),
            OpenMode::ReadWrite if file.locked => return busy("open for writing already"),
            OpenMode::ReadWrite if owner != 0 && file.readers.iter().any(|reader| *reader != owner) => {
                return busy("open for reading");
            }
            OpenMode::ReadWrite => (file.locked, file.writer) = (true, owner),
        }
        Ok(())
    }

    /// Takes an operation in. The future that waits for its answer asks by the returned number.
    ///
    /// # Panics
    /// When a direct and a cached write mix in one page.
    pub fn submit(&mut self, file: usize, mut kind: Kind) -> u64 {
        // A read shows what was stored before it, and a sync covers it. What is stored later may be in both.
        self.look_at_mapped(file);
        self.next_op += 1;
        let id = self.next_op;
        if let Kind::Sync { in_flight, number } = &mut kind {
            self.syncs += 1;
            *number = self.syncs;
            *in_flight = self.ops.iter().filter(|op| op.file == file).map(|op| op.id).collect();
        }
        let range = kind.range();
        if let Kind::Write { via, .. } = &kind
            && let Err(mixed) = self.files[file].note_way(range.clone(), *via)
        {
            panic!("{mixed}");
        }
        self.note(kind.name(), [file as u64, range.start, range.end - range.start]);
        let op = self.make_op(id, file, kind);
        self.ops.push(op);
        id
    }

    fn make_op(&mut self, id: u64, file: usize, kind: Kind) -> Op {
        let touch = if self.sabotage.chooses() { kind.touch() } else { None };
        let view = &self.files[file].view;
        let harm = touch.map_or(Harm::default(), |touch| self.sabotage.harm(view, &touch));
        let is_sync = matches!(kind, Kind::Sync { .. });
        let early = harm.late || (is_sync && self.sabotage.is_early_sync());
        let due = self.due_of(file);
        let backwards = self.rng.chance(1, 2);
        let stage = Stage::Working { done_bytes: 0 };
        Op { id, file, kind, due, stage, waker: None, backwards, early, harm }
    }

    /// The step at which an operation on this file may move on.
    fn due_of(&mut self, file: usize) -> u64 {
        let due = self.step + self.delay();
        self.hung.get(&file).map_or(due, |until| due.max(*until))
    }

    /// Draws the number of steps until an operation may move: mostly none, at times many.
    fn delay(&mut self) -> u64 {
        if self.rng.chance(self.faults.slow, 10_000) {
            return self.rng.between(200, 2000);
        }
        match self.rng.below(8) {
            0 => self.rng.skewed(64),
            1 | 2 => self.rng.skewed(8),
            _ => 0,
        }
    }

    /// Lets the future that waits for `id` be woken at its answer.
    pub fn wait(&mut self, id: u64, waker: &Waker) {
        if let Some(op) = self.ops.iter_mut().find(|op| op.id == id) {
            op.waker = Some(waker.clone());
        }
    }

    fn advance(&mut self, index: usize) -> Option<Waker> {
        let step = self.step;
        let at = (0..self.ops.len()).filter(|at| self.ops[*at].due <= step).nth(index)?;
        let mut op = self.ops.swap_remove(at);
        if op.early {
            return self.answer_early(op);
        }
        if let Stage::Working { done_bytes } = op.stage {
            op.stage = self.work(&op, done_bytes);
            op.due = self.due_of(op.file);
            self.ops.push(op);
            return None;
        }
        if let Stage::Done(result) = op.stage
            && let Some(waker) = op.waker
        {
            self.note("answer", [op.id, u64::from(result.is_ok()), 0]);
            self.results.insert(op.id, result);
            return Some(waker);
        }
        None
    }

    /// Sabotage: the operation is answered now and takes effect later.
    fn answer_early(&mut self, mut op: Op) -> Option<Waker> {
        let waker = op.waker.take();
        self.results.insert(op.id, Ok(()));
        op.early = false;
        op.due = self.step + 20 + self.rng.skewed(400);
        self.ops.push(op);
        waker
    }

    /// Lets a piece of an operation, or the rest of it, take effect.
    fn work(&mut self, op: &Op, done: usize) -> Stage {
        if done == 0
            && let Err(error) = self.fail(op)
        {
            return Stage::Done(Err(error));
        }
        let range = op.kind.range();
        let left = (range.end - range.start) as usize - done;
        let granule = self.hardware.align_bytes.max(512) as usize;
        let torn = left > granule && self.rng.chance(1, 3);
        let len = if torn { granule * (1 + self.rng.index(left / granule)) } else { left };
        if len < left {
            self.effect(op, op.piece(done, len));
            return Stage::Working { done_bytes: done + len };
        }
        Stage::Done(self.last_effect(op, op.piece(done, left)))
    }

    fn last_effect(&mut self, op: &Op, piece: Range<usize>) -> Result<()> {
        match &op.kind {
            Kind::Sync { in_flight, number } => self.sync(op, in_flight, *number),
            Kind::Read { .. } | Kind::Ask => {
                self.effect(op, piece);
                Ok(())
            }
            _ => {
                self.effect(op, piece);
                Ok(())
            }
        }
    }

    /// The bytes `piece` of the operation take effect.
    fn effect(&mut self, op: &Op, piece: Range<usize>) {
        self.look_at_mapped(op.file);
        let file = &mut self.files[op.file];
        let change = match &op.kind {
            Kind::Read { offset, into } => {
                let mut bytes = vec![0; piece.len()];
                file.view.read(offset + piece.start as u64, &mut bytes);
                return into.copy_from_slice(piece.start, &bytes);
            }
            Kind::Write { offset, from, .. } => {
                let mut bytes = vec![0; piece.len()];
                from.copy_to_slice(piece.start, &mut bytes);
                Change::Write { offset: offset + piece.start as u64, bytes }
            }
            Kind::Zero { range } => {
                let start = range.start + piece.start as u64;
                Change::Zero { range: start..start + piece.len() as u64 }
            }
            Kind::SetLen(len) => Change::SetLen(*len),
            Kind::Sync { .. } | Kind::Ask => return,
        };
        let via = if let Kind::Write { via, .. } = op.kind { Some(via) } else { None };
        if !op.harm.lost {
            file.apply(Effect { op: op.id, via, harm: op.harm, change });
        }
    }

    fn sync(&mut self, op: &Op, in_flight: &[u64], number: u64) -> Result<()> {
        self.look_at_mapped(op.file);
        if self.sabotage.skips_sync(number) || self.files[op.file].is_sync_void() {
            return Ok(());
        }
        let writing: Vec<_> = self
            .ops
            .iter()
            .filter(|other| other.file == op.file)
            .filter_map(|other| match other.kind {
                Kind::Write { via, .. } => Some((other.kind.range(), via)),
                _ => None,
            })
            .collect();
        let optional = |id: u64| id > op.id || in_flight.contains(&id);
        self.files[op.file].sync(&mut self.rng, optional, &writing);
        Ok(())
    }

    /// The kernel looks at the mapped memory of any file at any time, and may write back what it finds there.
    fn look_around(&mut self) {
        for file in 0..self.files.len() {
            if self.files[file].is_mapped() && self.rng.chance(1, 8) {
                self.look_at_mapped(file);
            }
        }
    }

    /// What it finds there is an operation of its own: a sync that was submitted before need not cover it.
    fn look_at_mapped(&mut self, file: usize) {
        if self.files[file].is_mapped() {
            self.next_op += 1;
            self.files[file].look_at_mapped(self.next_op);
        }
    }

    /// Decides whether the operation fails instead; a failed write may have taken effect in part.
    fn fail(&mut self, op: &Op) -> Result<()> {
        let (len, range) = (self.files[op.file].view.len(), op.kind.range());
        let stays_inside = self.hardware.devices || matches!(op.kind, Kind::Read { .. } | Kind::Zero { .. });
        if stays_inside && range.end > len {
            return Err(Error::new(ErrorKind::OutOfRange, "past the end of the simulated file"));
        }
        let faults = self.faults.clone();
        match &op.kind {
            Kind::Read { .. } => self.fault(faults.read_eio, 5),
            Kind::Write { .. } => {
                self.check_space(op, &faults)?;
                self.fault(faults.no_space, 28)?;
                self.fail_midway(op, faults.write_eio)
            }
            Kind::Zero { .. } => self.fail_midway(op, faults.write_eio),
            Kind::SetLen(_) if self.hardware.devices => {
                Err(Error::new(ErrorKind::Unsupported, "a device cannot change its length"))
            }
            Kind::SetLen(_) => self.fault(faults.write_eio, 5),
            Kind::Sync { .. } => self.fail_sync(op.file, &faults),
            Kind::Ask => Ok(()),
        }
    }

    pub fn fault(&mut self, chance: u64, errno: i32) -> Result<()> {
        if !self.fault_rng.chance(chance, 10_000) {
            return Ok(());
        }
        self.faults_fired += 1;
        self.note("fault", [errno as u64, 0, 0]);
        Err(Error::errno("injected fault", errno))
    }

    fn check_space(&mut self, op: &Op, faults: &Faults) -> Result<()> {
        let Some(space_bytes) = faults.space_bytes else { return Ok(()) };
        let used: u64 = self.files.iter().map(|file| file.view.allocated_bytes()).sum();
        let new = self.files[op.file].view.new_pages(op.kind.range()) * PAGE;
        if new == 0 || used + new <= space_bytes {
            return Ok(());
        }
        self.faults_fired += 1;
        Err(Error::errno("no space in the simulated host", 28))
    }

    fn fail_midway(&mut self, op: &Op, chance: u64) -> Result<()> {
        let failed = self.fault(chance, 5);
        if failed.is_err() {
            self.partly(op, 0, true);
        }
        failed
    }

    /// A random part of what is left of an operation takes effect.
    fn partly(&mut self, op: &Op, done: usize, from_faults: bool) {
        let rng = if from_faults { &mut self.fault_rng } else { &mut self.crash_rng };
        let range = op.kind.range();
        let left = (range.end - range.start) as usize - done;
        let granule = self.hardware.align_bytes.max(512) as usize;
        let len = match rng.below(3) {
            0 => return,
            1 => left,
            _ => granule * rng.index(left / granule + 1),
        };
        self.effect(op, op.piece(done, len));
    }

    fn fail_sync(&mut self, file: usize, faults: &Faults) -> Result<()> {
        if !self.files[file].sync_failed {
            let failed = self.fault(faults.sync_eio, 5);
            if failed.is_err() && faults.forgetful_sync {
                self.files[file].lose_unsynced();
                return failed;
            }
            self.files[file].sync_failed = failed.is_err();
            return failed;
        }
        Err(Error::errno("an earlier sync of this file had failed", 5))
    }

    fn kill(&mut self, how: &str) {
        self.note(how, [self.ops.len() as u64, 0, 0]);
        for op in std::mem::take(&mut self.ops) {
            if let Stage::Working { done_bytes } = op.stage
                && op.kind.is_change()
            {
                self.partly(&op, done_bytes, false);
            }
        }
        self.results.clear();
        self.slow_reads.clear();
        self.files.iter_mut().for_each(SimFile::process_death);
        self.life += 1;
        self.clock_ms += self.crash_rng.between(1000, 100_000);
    }
}
