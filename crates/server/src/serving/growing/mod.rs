//! Thin disks whose devices grow while guests write.
//!
//! A disk's image tells its room on a block device when it takes some of it, and when it finds none ([`Layer::watch_room`]). With less than the
//! margin left, the disk *wants* a longer device: who looks sees that, and the server's command is run, if it has one.
//!
//! - **Nothing is asked from time to time.** A disk that is idle, or has enough room, wakes nobody.
//! - **The main loop starts the command**, on a thread of its own, and no other one for the disk before that has ended. A worker only sends an
//!   event.
//! - **Requests that find no room wait** in the node while the command runs ([`Troubles::with_room_maker`]), and hold nothing but themselves. They are
//!   tried again once the device is longer. When the command fails, they fail, or go on waiting, as the disk's policy for trouble says.
//! - **A command that fails is not run again at once**, but after a pause that doubles each time. No timer waits for that: the next write that
//!   wants room runs it.
//! - **The device's length decides.** A command that ends well and leaves the device as long as it was has failed; one that fails, and has made
//!   it longer, has not.
//!
//! The image is not changed by any of that. A server that is killed meanwhile leaves the command to its end; the next server finds the device
//! longer, or wants it again. The length that is wanted is absolute, so two commands in a row do no harm.
//!
//! [`Layer::watch_room`]: spile_image::layer::Layer::watch_room

mod command;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use spile_core::{Error, ErrorKind, Result, Store as _, format_size};
use spile_image::layer::Layer as _;
use spile_image::{Graph, Room};
use spile_node::Troubles;
use spile_store::{FileId, HostStore};

use self::command::{END_PATIENCE, Run};
use super::api::types;
use super::control::Event;
use super::disks::{Open, ServedDisk};
use super::events::{self, RoomMade, RoomWanted, Said, What};
use super::server::Server;
use crate::grow::{DEFAULT_AHEAD_BYTES, DEFAULT_TIMEOUT, GrowOptions};

/// The pause after the first failure; each further one doubles it.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// How long the main loop and a worker may take before and after a command. Then requests do not wait for it any more.
const SLACK: Duration = Duration::from_secs(5);

/// The growth of the device under one disk.
pub struct Growth {
    /// The disk's name.
    disk: String,
    command: Option<PathBuf>,
    ahead_bytes: u64,
    timeout: Duration,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The device, while the disk's leaf is a thin image on one.
    device: Option<PathBuf>,
    /// What the image has told last.
    room: Option<Room>,
    events: Option<mpsc::Sender<Event>>,
    /// While the command runs.
    running: Option<Running>,
    not_before: Option<Instant>,
    /// The pause after the last failure, if no growth has come since.
    pause: Option<Duration>,
    grown: u64,
    failed: u64,
    last_failure: Option<(String, u64)>,
    /// The length of the device when the log last said that it is too short.
    told_bytes: Option<u64>,
}

/// A command that runs, or is about to.
#[derive(Clone, Copy)]
struct Running {
    /// Until when requests wait for it.
    wait_until: Instant,
    /// The device's length when it was asked for. The image may take up what it has gained before the command ends.
    device_bytes: u64,
}

impl Growth {
    /// The growth of the disk of this name.
    pub fn new(disk: String, options: &GrowOptions) -> Arc<Self> {
        Arc::new(Self {
            disk,
            command: options.command.clone(),
            ahead_bytes: options.ahead_bytes.unwrap_or(DEFAULT_AHEAD_BYTES),
            timeout: options.timeout.unwrap_or(DEFAULT_TIMEOUT),
            state: Mutex::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hears of the room of this graph's leaf from now on, if that is a thin image on a block device.
    pub fn watch(self: &Arc<Self>, graph: &Graph<HostStore>) {
        let leaf = graph.handles()[0].image();
        let is_device = matches!(leaf.store().file_id(), Some(FileId::BlockDevice(_)));
        let growth = Arc::downgrade(self);
        let hear = move |room| growth.upgrade().into_iter().for_each(|growth| growth.hear(room));
        let device = (is_device && leaf.watch_room(Arc::new(hear))).then(|| leaf.store().path());
        let device = device.map(|path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned()));
        let mut state = self.lock();
        if state.device != device {
            (state.device, state.room, state.told_bytes) = (device, None, None);
        }
    }

    /// Refuses a command for a disk that never needs it.
    ///
    /// # Errors
    /// `InvalidInput`; as [`GrowOptions::check`].
    pub fn check(&self, options: &GrowOptions, label: &str) -> Result<()> {
        options.check()?;
        if options.command.is_none() || options.leaves_others || self.lock().device.is_some() {
            return Ok(());
        }
        let what = "--grow is for a disk whose thin image (qcow2, dynamic VHD) lies on a block device and is written";
        Err(Error::new(ErrorKind::InvalidInput, format!("{what}: {label} is none"))
            .hint("a file grows by itself, and a raw disk is as long as its device; give grow=COMMAND to the disks that need it"))
    }

    /// From now on the main loop hears when the disk wants a longer device.
    pub fn tell_to(self: &Arc<Self>, events: mpsc::Sender<Event>) {
        let mut state = self.lock();
        state.events = Some(events);
        self.ask(&mut state);
    }

    /// The image has `room`. A worker calls this.
    fn hear(self: &Arc<Self>, room: Room) {
        let mut state = self.lock();
        let before = state.room.replace(room);
        if before.is_some_and(|before| before.device_bytes < room.device_bytes) {
            let made = RoomMade { device_bytes: room.device_bytes };
            events::tell(Some(&self.disk), What::RoomMade(made));
        }
        self.ask(&mut state);
    }

    /// Asks the main loop for a longer device, if one is wanted and nothing is against it.
    fn ask(self: &Arc<Self>, state: &mut State) {
        let Some((room, wanted_bytes)) = self.wanted(state) else { return };
        if self.command.is_none() {
            return self.tell_wish(state, room, wanted_bytes);
        }
        let now = Instant::now();
        if state.running.is_some() || state.not_before.is_some_and(|time| now < time) {
            return;
        }
        let Some(events) = &state.events else { return };
        // A server that ends hears nothing more.
        if events.send(Event::WantsRoom(self.clone())).is_ok() {
            let wait_until = now + self.timeout + END_PATIENCE + SLACK;
            state.running = Some(Running { wait_until, device_bytes: room.device_bytes });
        }
    }

    fn wanted(&self, state: &State) -> Option<(Room, u64)> {
        let room = state.room?;
        Some((room, room.wanted_bytes(self.ahead_bytes)?))
    }

    /// Says once for each length of the device that it is too short.
    fn tell_wish(&self, state: &mut State, room: Room, wanted_bytes: u64) {
        if state.told_bytes.replace(room.device_bytes) == Some(room.device_bytes) {
            return;
        }
        let (disk, free) = (&self.disk, format_size(room.free_bytes));
        let device = state.device.as_deref().unwrap_or(Path::new("?")).display();
        tracing::warn!(
            journal.disk = disk,
            "the disk {disk:?} has {free} of room left on {device}: make that {wanted_bytes} bytes long, then `spile resume {disk}`"
        );
        let wanted = RoomWanted {
            device: device.to_string(),
            device_bytes: room.device_bytes,
            free_bytes: room.free_bytes,
            wants_bytes: wanted_bytes,
        };
        events::tell(Some(disk), What::RoomWanted(wanted));
    }

    /// The disk that grows so, while it is served. One that was attached anew under the same name is another one.
    fn disk_of<'a>(self: &Arc<Self>, disks: &'a [Open]) -> Option<&'a Open> {
        disks.iter().find(|open| Arc::ptr_eq(&open.growth, self))
    }

    /// True when somebody makes the device longer on the disk's behalf.
    pub fn has_command(&self) -> bool {
        self.command.is_some()
    }

    /// True while a command makes room, for requests that have found none.
    pub fn is_at_work(&self) -> bool {
        self.lock().running.is_some_and(|running| Instant::now() < running.wait_until)
    }

    /// Has the next wish run the command at once, whatever has failed before.
    pub fn forget_failures(&self) {
        let mut state = self.lock();
        (state.not_before, state.pause) = (None, None);
    }

    /// The command's arguments: the device, its length, and the length that is wanted.
    fn arguments(&self) -> Option<Vec<OsString>> {
        let state = self.lock();
        let (room, wanted_bytes) = self.wanted(&state)?;
        let device = state.device.clone()?.into_os_string();
        Some(vec![device, room.device_bytes.to_string().into(), wanted_bytes.to_string().into()])
    }

    /// Runs the command to its end.
    fn run(&self) -> Result<()> {
        // The wish may have passed: then there is nothing to do.
        let (Some(program), Some(arguments)) = (&self.command, self.arguments()) else { return Ok(()) };
        Run { program, arguments, disk: &self.disk, timeout: self.timeout }.finish()
    }

    fn device_bytes(&self) -> u64 {
        self.lock().room.map_or(0, |room| room.device_bytes)
    }

    /// Has the image take up what its device has gained, and tells requests that wait for it. `outcome` is what came of the command.
    async fn end(self: &Arc<Self>, disk: &ServedDisk, outcome: Result<()>) {
        let before = self.lock().running.map_or(0, |running| running.device_bytes);
        let looked = look(disk).await;
        let now = self.device_bytes();
        if now > before {
            self.note_growth(before, now);
            disk.troubles().map(Troubles::try_again);
        } else if let Err(error) = outcome.and(looked) {
            self.note_failure(&error);
        } else if self.wanted(&self.lock()).is_some() {
            self.note_failure(&not_longer(now));
        }
        self.finish();
        disk.troubles().into_iter().for_each(Troubles::look_again);
    }

    fn note_growth(&self, before: u64, now: u64) {
        let mut state = self.lock();
        state.grown += 1;
        (state.not_before, state.pause) = (None, None);
        let disk = &self.disk;
        tracing::info!(journal.disk = disk, "the device of the disk {disk:?} has {now} bytes now; it had {before}");
    }

    fn note_failure(&self, error: &Error) {
        let mut state = self.lock();
        let pause = state.pause.map_or(FIRST_PAUSE, |pause| (pause * 2).min(LONGEST_PAUSE));
        (state.not_before, state.pause) = (Some(Instant::now() + pause), Some(pause));
        state.failed += 1;
        let now_unix_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        state.last_failure = Some((error.to_string(), now_unix_s));
        let (disk, pause_s) = (&self.disk, pause.as_secs());
        tracing::error!(
            journal.disk = disk,
            journal.error = error as &(dyn std::error::Error + 'static),
            "no room was made for the disk {disk:?}, and the command is not run again for {pause_s} s: {error}"
        );
        events::tell(Some(disk), What::RoomFailed(Said { message: error.to_string() }));
    }

    /// No command runs any more. When a request has found no room since, or there is too little still, the next one is asked for in the same
    /// moment: a request that looks never finds that nobody makes room.
    fn finish(self: &Arc<Self>) {
        let mut state = self.lock();
        state.running = None;
        self.ask(&mut state);
    }

    /// What callers see; `None` where the disk's leaf is no thin image on a block device.
    pub fn show(&self) -> Option<types::Room> {
        let state = self.lock();
        let failure = |(message, at_unix_s): &(String, u64)| types::GrowthFailure {
            message: message.clone(),
            at_unix_s: *at_unix_s,
        };
        Some(types::Room {
            device: state.device.as_ref()?.display().to_string(),
            device_bytes: state.room.map(|room| room.device_bytes),
            free_bytes: state.room.map(|room| room.free_bytes),
            wants_bytes: self.wanted(&state).map(|(_, wanted_bytes)| wanted_bytes),
            ahead_bytes: self.ahead_bytes,
            command: self.command.as_ref().map(|command| command.display().to_string()),
            is_growing: state.running.is_some(),
            grown_total: state.grown,
            failed_total: state.failed,
            last_failure: state.last_failure.as_ref().map(failure),
        })
    }
}

/// Has the image of a disk take up what its device has gained, and tell its room.
///
/// # Errors
/// As [`Layer::look_for_room`](spile_image::layer::Layer::look_for_room).
pub async fn look(disk: &ServedDisk) -> Result<()> {
    let graph = disk.graph().await;
    graph.handles()[0].image().look_for_room().await
}

fn not_longer(device_bytes: u64) -> Error {
    let what =
        format!("the command has ended well, but the device is not longer than the {device_bytes} bytes that it had");
    Error::new(ErrorKind::NoSpace, what)
}

impl Server {
    /// Runs the command of a disk that wants a longer device, on a thread of its own. Its end comes back as an event.
    pub(super) fn begin_growth(&self, growth: Arc<Growth>) {
        if growth.disk_of(&self.disks).is_none() {
            return;
        }
        let (runs, events) = (growth.clone(), self.sender.clone());
        let run = move || {
            let outcome = runs.run();
            drop(events.send(Event::RoomMade(runs, outcome)));
        };
        if let Err(source) = std::thread::Builder::new().name("grow".to_owned()).spawn(run) {
            self.end_growth(growth, Err(Error::io("start a thread", source)));
        }
    }

    /// The command of a disk has ended.
    pub(super) fn end_growth(&self, growth: Arc<Growth>, outcome: Result<()>) {
        let Some(open) = growth.disk_of(&self.disks) else { return };
        let disk = open.disk.clone();
        self.engine.spawn_on(0, move || async move { growth.end(&disk, outcome).await });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn room(free_bytes: u64, is_out: bool) -> Room {
        Room { device_bytes: 100 * MIB, free_bytes, most_bytes: 1000 * MIB, is_out }
    }

    fn growth(command: Option<&str>) -> (Arc<Growth>, mpsc::Receiver<Event>) {
        let options = GrowOptions {
            command: command.map(PathBuf::from),
            ahead_bytes: Some(10 * MIB),
            timeout: Some(Duration::from_secs(1000)),
            ..GrowOptions::default()
        };
        let (growth, (sender, events)) = (Growth::new("d".to_owned(), &options), mpsc::channel());
        growth.lock().device = Some("/dev/d".into());
        growth.tell_to(sender);
        (growth, events)
    }

    fn wishes(events: &mpsc::Receiver<Event>) -> usize {
        events.try_iter().filter(|event| matches!(event, Event::WantsRoom(growth) if growth.disk == "d")).count()
    }

    #[test]
    fn the_command_is_asked_for_once_while_there_is_too_little_room() {
        let (growth, events) = growth(Some("/bin/true"));
        growth.hear(room(50 * MIB, false));
        assert_eq!((wishes(&events), growth.is_at_work()), (0, false));
        growth.hear(room(9 * MIB, false));
        growth.hear(room(0, true));
        assert_eq!((wishes(&events), growth.is_at_work()), (1, true));
        let arguments = growth.arguments().unwrap();
        assert_eq!(arguments, ["/dev/d", "104857600", "125829120"].map(OsString::from));
        growth.hear(Room { device_bytes: 120 * MIB, ..room(20 * MIB, false) });
        growth.note_growth(100 * MIB, 120 * MIB);
        growth.finish();
        assert_eq!((wishes(&events), growth.is_at_work()), (0, false));
        let shown = growth.show().unwrap();
        assert_eq!((shown.grown_total, shown.wants_bytes, shown.free_bytes), (1, None, Some(20 * MIB)));
    }

    #[test]
    fn what_finds_no_room_at_the_end_of_a_command_is_waited_for() {
        let (growth, events) = growth(Some("/bin/true"));
        growth.hear(room(0, true));
        growth.hear(Room { device_bytes: 101 * MIB, ..room(MIB, false) });
        growth.note_growth(100 * MIB, 101 * MIB);
        growth.hear(Room { device_bytes: 101 * MIB, ..room(0, true) });
        growth.finish();
        assert_eq!((wishes(&events), growth.is_at_work()), (2, true));
    }

    #[test]
    fn a_command_that_has_failed_is_not_run_again_at_once() {
        let (growth, events) = growth(Some("/bin/false"));
        growth.hear(room(0, true));
        for (failures, pause_s) in [1, 2, 4, 8, 16, 32, 60, 60].into_iter().enumerate() {
            growth.note_failure(&Error::new(ErrorKind::Io, "no extents"));
            growth.finish();
            growth.hear(room(0, true));
            assert_eq!((wishes(&events), growth.is_at_work()), (usize::from(failures == 0), false));
            assert_eq!(growth.lock().pause, Some(Duration::from_secs(pause_s)));
        }
        let shown = growth.show().unwrap();
        assert_eq!((shown.failed_total, shown.wants_bytes), (8, Some(120 * MIB)));
        assert!(shown.last_failure.unwrap().message.contains("no extents"));
        growth.forget_failures();
        growth.hear(room(0, true));
        assert_eq!((wishes(&events), growth.is_at_work()), (1, true));
    }

    #[test]
    fn without_a_command_the_wish_is_shown_and_nobody_waits() {
        let (growth, events) = growth(None);
        growth.hear(room(MIB, false));
        assert_eq!((wishes(&events), growth.is_at_work()), (0, false));
        assert_eq!(growth.show().unwrap().wants_bytes, Some(119 * MIB));
        assert_eq!(growth.lock().told_bytes, Some(100 * MIB));
    }

    #[test]
    fn a_server_that_ends_has_nobody_wait_for_room() {
        let (growth, events) = growth(Some("/bin/true"));
        drop(events);
        growth.hear(room(0, true));
        assert!(!growth.is_at_work());
    }

    #[test]
    fn a_command_is_refused_where_there_is_no_thin_image_on_a_device() {
        let options = GrowOptions { command: Some("/bin/true".into()), ..GrowOptions::default() };
        let growth = Growth::new("d".to_owned(), &options);
        let error = growth.check(&options, "a.qcow2").unwrap_err();
        assert!(error.kind() == ErrorKind::InvalidInput && error.to_string().contains("a.qcow2 is none"), "{error}");
        growth.check(&GrowOptions { ahead_bytes: Some(1), ..GrowOptions::default() }, "a.qcow2").unwrap();
        growth.lock().device = Some("/dev/d".into());
        growth.check(&options, "/dev/d").unwrap();
    }
}
