//! Moves of which one thing goes wrong at one moment: names that cannot be put back, names that others get meanwhile, notes of other disks, and a server that
//! does late what it was asked for.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use spile_core::{
    Env, Error, ErrorKind, Files, Locator, OpenMode, Result, Segments, Store, StoreExtent, StoreInfo, StoreOffset,
    Timer, Via,
};
use spile_image::layer::Identity;
use spile_image::{Broken, Format, Graph, OpenOptions};
use spile_life::jobs::{Job, Plan, Wishes};
use spile_life::motion::{ANSWER, ANSWER_BYTES, Move, Order, Receiver, old_image, take_back};
use spile_life::{Sizes, Work, names, recover};
use spile_node::Node;
use spile_sim::exec::block_on;
use spile_sim::plan::Plan as SimPlan;
use spile_sim::{SimFiles, SimStore, World};

const SIZE: usize = 64 << 10;
const DISK: &str = "/vm/disk.raw";
/// The folder of the other host.
const THERE: &str = "/there";
const HOST: &str = "nbd://there/";
const ID: Identity = Identity([7; 16]);

/// What goes wrong.
#[derive(Default)]
struct Trouble {
    /// The disk's folder cannot be synced once the disk has lost its name: what is seen there may not last.
    names_fail: AtomicBool,
    has_lost_name: AtomicBool,
    /// Another disk gets the new name as soon as the half is there.
    name_is_taken: AtomicBool,
    /// How the next write to an export ends that comes by it.
    next_write: Mutex<Option<Error>>,
    /// How often the export was opened.
    opened: AtomicUsize,
    /// The file that another server has open for all its clients.
    served: Mutex<Option<Arc<SimStore>>>,
}

/// The files of a host, and the exports of another one.
#[derive(Clone)]
struct Both {
    world: World,
    files: SimFiles,
    /// The other host has `spile receive`; else any server, whose one export is there.
    is_receiver: bool,
    trouble: Arc<Trouble>,
}

struct BothStore {
    store: Arc<SimStore>,
    export: Option<Arc<Trouble>>,
}

fn which(store: &SimStore) -> String {
    format!("{:?}", store.file_identity())
}

impl Both {
    fn new(world: &World, is_receiver: bool) -> Self {
        Self { world: world.clone(), files: world.files(), is_receiver, trouble: Arc::default() }
    }

    async fn with_receiver<T>(&self, work: impl AsyncFnOnce(&Receiver<'_, SimFiles>) -> T) -> T {
        let (files, env): (_, Arc<dyn Env>) = (&self.files, self.world.env());
        work(&Receiver { files, asking: files, env: &env, folder: Path::new(THERE), which: &which }).await
    }

    async fn obey(&self, receiver: &Receiver<'_, SimFiles>, order: Order, name: &str) -> Result<()> {
        match order {
            Order::Begin { id, size_bytes } => receiver.begin(name, id, size_bytes).await.map(drop),
            Order::Ask { id } => receiver.check_half(name, id).await.map(drop),
            Order::HandOver { id } => receiver.hand_over(name, id).await,
            Order::Finish { id } => receiver.finish(name, id, None).await.map(drop),
            Order::Drop { id } => {
                receiver.drop_half(name, id).await?;
                Err(Error::new(ErrorKind::Denied, "the half-made image is removed"))
            }
            order => panic!("{order:?}"),
        }
    }

    async fn export(&self, uri: &str) -> Result<BothStore> {
        let export = uri.strip_prefix(HOST).expect("there is one host");
        let path = match Order::of_export(export) {
            _ if !self.is_receiver && export != "export.raw" => {
                return Err(Error::new(ErrorKind::NotFound, "there is no such export"));
            }
            None => Path::new(THERE).join(export),
            Some((Order::GoOn { id, .. }, name)) => {
                self.with_receiver(async |receiver| receiver.write_on(name, id).await).await?.0.path
            }
            Some((order, name)) => {
                self.with_receiver(async |receiver| self.obey(receiver, order, name).await).await?;
                let mut answer = ANSWER.as_bytes().to_vec();
                answer.resize(ANSWER_BYTES as usize, 0);
                let path = PathBuf::from("/answer");
                if self.world.file_number(&path).is_none() {
                    self.world.install(&path, &answer);
                }
                let store = self.files.open(&path.into(), OpenMode::ReadOnly).await?;
                return Ok(BothStore { store: Arc::new(store), export: None });
            }
        };
        self.trouble.opened.fetch_add(1, SeqCst);
        let served = self.trouble.served.lock().unwrap().clone().filter(|_| !self.is_receiver);
        let store = match served {
            Some(store) => store,
            None => Arc::new(self.files.open(&path.into(), OpenMode::ReadWrite).await?),
        };
        if !self.is_receiver {
            self.trouble.served.lock().unwrap().replace(store.clone());
        }
        Ok(BothStore { store, export: Some(self.trouble.clone()) })
    }

    fn fails(&self, path: &Path) -> Result<()> {
        match self.trouble.has_lost_name.load(SeqCst) && path.parent() == Path::new(DISK).parent() {
            true => Err(Error::errno("cannot sync the folder", 5)),
            false => Ok(()),
        }
    }
}

impl Files for Both {
    type Store = BothStore;

    async fn open(&self, at: &Locator, mode: OpenMode) -> Result<BothStore> {
        match at {
            Locator::Nbd(uri) => self.export(uri).await,
            at => Ok(BothStore { store: Arc::new(self.files.open(at, mode).await?), export: None }),
        }
    }

    async fn create(&self, path: &Path, len_bytes: u64) -> Result<BothStore> {
        let store = Files::create(&self.files, path, len_bytes).await?;
        if let Some(disk) = names::disk_of_half(path)
            && self.trouble.name_is_taken.load(SeqCst)
        {
            for path in [disk.clone(), names::changes(&disk), names::came(&disk)] {
                self.world.install(path, b"another disk's");
            }
        }
        Ok(BothStore { store: Arc::new(store), export: None })
    }

    async fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.files.rename(from, to).await
    }

    async fn link(&self, from: &Path, to: &Path) -> Result<()> {
        self.files.link(from, to).await?;
        self.fails(to)
    }

    async fn is_at(&self, store: &BothStore, path: &Path) -> Result<bool> {
        self.files.is_at(&store.store, path).await
    }

    async fn reopen(&self, store: &BothStore, mode: OpenMode) -> Result<BothStore> {
        Ok(BothStore { store: Arc::new(self.files.reopen(&store.store, mode).await?), export: store.export.clone() })
    }

    async fn remove(&self, path: &Path) -> Result<()> {
        self.files.remove(path).await?;
        if path == Path::new(DISK) && self.trouble.names_fail.load(SeqCst) {
            self.trouble.has_lost_name.store(true, SeqCst);
        }
        self.fails(path)
    }

    async fn sync_names(&self, path: &Path) -> Result<()> {
        self.files.sync_names(path).await
    }

    async fn canonical(&self, path: &Path) -> Result<PathBuf> {
        self.files.canonical(path).await
    }
}

impl Store for BothStore {
    fn info(&self) -> StoreInfo {
        let info = self.store.info();
        if self.export.is_some() { StoreInfo { grows_zeroed: false, is_local: false, ..info } } else { info }
    }

    fn len_bytes(&self) -> u64 {
        self.store.len_bytes()
    }

    fn path(&self) -> &Path {
        self.store.path()
    }

    fn set_path(&self, path: &Path) {
        self.store.set_path(path);
    }

    fn file_identity(&self) -> Option<[u8; 16]> {
        self.store.file_identity()
    }

    async fn read_at(&self, at: StoreOffset, into: &Segments, via: Via) -> Result<()> {
        self.store.read_at(at, into, via).await
    }

    async fn write_at(&self, at: StoreOffset, from: &Segments, via: Via) -> Result<()> {
        let ends = self.export.as_ref().and_then(|trouble| trouble.next_write.lock().unwrap().take());
        match ends {
            Some(error) => Err(error),
            None => self.store.write_at(at, from, via).await,
        }
    }

    async fn sync(&self) -> Result<()> {
        self.store.sync().await
    }

    async fn zero_range(&self, at: StoreOffset, len_bytes: u64) -> Result<()> {
        self.store.zero_range(at, len_bytes).await
    }

    async fn punch_hole(&self, at: StoreOffset, len_bytes: u64) -> Result<()> {
        self.store.punch_hole(at, len_bytes).await
    }

    async fn set_len(&self, len_bytes: u64) -> Result<()> {
        self.store.set_len(len_bytes).await
    }

    async fn extent_at(&self, at: StoreOffset) -> Result<StoreExtent> {
        self.store.extent_at(at).await
    }
}

/// A clock whose sleeps are short.
struct Turns;

impl Timer for Turns {
    fn sleep(&self, time: Duration) -> Pin<Box<dyn Future<Output = ()>>> {
        let mut left = 2 + time.as_millis() / 2;
        Box::pin(std::future::poll_fn(move |context| {
            if left == 0 {
                return Poll::Ready(());
            }
            left -= 1;
            context.waker().wake_by_ref();
            Poll::Pending
        }))
    }
}

/// A host with a disk that holds something.
fn host() -> World {
    let world = World::new(0, SimPlan::draw(0, SIZE as u64, 4096).hardware);
    world.install(DISK, &[1; SIZE]);
    world
}

/// Moves the disk, as it is open, to `to`.
async fn move_disk(files: &Both, to: Locator) -> Result<()> {
    let env: Arc<dyn Env> = files.world.env();
    let graph = Graph::open(files, env.clone(), Path::new(DISK), &OpenOptions::default()).await?;
    graph.begin();
    let (node, job) = (Node::new(graph), Job::new(Wishes::default()));
    let work = Work {
        files,
        asking: files,
        env: &env,
        timer: &Turns,
        node: &node,
        job: &job,
        neighbours: &Vec::new(),
        marks: None,
        sizes: Sizes::default(),
        broken: Broken::Nothing,
    };
    let id = files.is_receiver.then_some(ID);
    let (deletes_source, keeps_chain, stays, has_no_mark) = Default::default();
    let plan = Move { to, format: Format::Raw, deletes_source, keeps_chain, stays, has_no_mark, id };
    spile_life::run(&work, &Plan::Move(plan)).await
}

fn export(name: &str) -> Locator {
    Locator::Nbd(format!("{HOST}{name}"))
}

fn text_of(world: &World, path: &Path) -> Option<String> {
    let view = world.view(path)?;
    let mut text = vec![0; view.len() as usize];
    view.read(0, &mut text);
    Some(String::from_utf8_lossy(&text).into_owned())
}

/// A note beside `disk`: the other host may not know yet that the disk which was there is handed over.
fn install_unfinished(world: &World, disk: &str) -> (PathBuf, String) {
    let disk = Path::new(disk);
    let (to, image) = ("nbd://other/x.raw", old_image(disk));
    let finish = Order::Finish { id: Identity([3; 16]) }.locator(&Locator::Nbd(to.to_owned())).unwrap();
    let text = format!("spile moved 1\nto {to}\nimage {}\nfinish {finish}\nend\n", image.display());
    world.install(names::moved(disk), text.as_bytes());
    (names::moved(disk), text)
}

/// The old image has lost its name, and cannot get it back for good: guests go on with it, and nothing leads to the copy, which is older from then on.
#[test]
fn a_copy_elsewhere_is_not_taken_for_a_disk_whose_names_are_lost() {
    for is_receiver in [true, false] {
        let world = host();
        world.install(format!("{THERE}/export.raw"), &[0; SIZE]);
        let files = Both::new(&world, is_receiver);
        let after = files.clone();
        let told = block_on(&world, async move {
            files.trouble.names_fail.store(true, SeqCst);
            let told = move_disk(&files, export(if is_receiver { "disk.raw" } else { "export.raw" })).await;
            told.unwrap_err()
        });
        assert!(told.to_string().contains("rename /vm/disk.moved.raw to /vm/disk.raw"), "{told}");
        // The power goes, and the name with it.
        after.trouble.has_lost_name.store(false, SeqCst);
        after.trouble.names_fail.store(false, SeqCst);
        let taken = block_on(&world, async move {
            after.files.remove(Path::new(DISK)).await.unwrap();
            take_back(&after, Path::new(DISK), true).await
        });
        assert!(matches!(taken, Ok(false)), "a copy is taken for the disk: {taken:?}");
        let there: Vec<_> = world.names().into_iter().filter(|path| path.starts_with(THERE)).collect();
        assert_eq!(there, [Path::new(THERE).join("export.raw")], "half a copy is left");
    }
}

/// Only the note says that a disk which was at the new path was handed over, and what is left to do.
#[test]
fn a_note_that_says_what_is_left_to_do_is_in_the_way_of_other_disks() {
    let world = host();
    let to = "/array/disk.raw";
    let (note, text) = install_unfinished(&world, to);
    let files = Both::new(&world, false);
    let told = block_on(&world, async move { move_disk(&files, Locator::Path(to.into())).await.unwrap_err() });
    assert_eq!((told.kind(), text_of(&world, &note)), (ErrorKind::Exists, Some(text)), "{told}");
    assert!(told.to_string().contains(&note.display().to_string()), "{told}");
    assert!(world.file_number(Path::new(DISK)).is_some());

    // A hand-over that was broken off between the two names.
    let world = host();
    let (note, text) =
        (names::moved(Path::new(to)), "spile moved 1\nto /b/x.raw\nimage /array/disk.moved.raw\nhalf /b/.h\nend\n");
    world.install(&note, text.as_bytes());
    world.install("/b/.h", b"half");
    let files = Both::new(&world, false);
    let told = block_on(&world, async move { move_disk(&files, Locator::Path(to.into())).await.unwrap_err() });
    assert_eq!((told.kind(), text_of(&world, &note).as_deref()), (ErrorKind::Exists, Some(text)), "{told}");
}

#[test]
fn a_note_that_says_what_is_left_to_do_is_not_overwritten_by_the_next_disk_that_leaves() {
    let world = host();
    let (note, text) = install_unfinished(&world, DISK);
    let files = Both::new(&world, false);
    let told =
        block_on(&world, async move { move_disk(&files, Locator::Path("/array/d.raw".into())).await.unwrap_err() });
    assert_eq!((told.kind(), text_of(&world, &note)), (ErrorKind::Exists, Some(text)), "{told}");
}

#[test]
fn a_note_that_says_what_is_left_to_do_is_in_the_way_of_disks_that_come_from_other_hosts() {
    for is_begun in [false, true] {
        let world = host();
        let disk = Path::new(THERE).join("disk.raw");
        if !is_begun {
            install_unfinished(&world, disk.to_str().unwrap());
        }
        let files = Both::new(&world, true);
        let told = block_on(&world, async move {
            let path = Path::new(THERE).join("disk.raw");
            files
                .with_receiver(async |receiver| {
                    receiver.begin("disk.raw", ID, SIZE as u64).await?;
                    install_unfinished(&files.world, path.to_str().unwrap());
                    receiver.hand_over("disk.raw", ID).await
                })
                .await
        });
        let told = told.unwrap_err();
        assert_eq!(told.kind(), ErrorKind::Exists, "{told}");
        assert!(told.message().contains("spile-moved"), "{told}");
        assert!(world.file_number(&names::moved(&disk)).is_some());
        assert_eq!(world.file_number(&disk), None, "the name is kept for a disk that cannot have it");
    }
}

/// A process was killed right before a hand-over. The note does not speak of the disk any more when somebody renames that.
#[test]
fn the_note_of_a_hand_over_that_was_killed_before_it_happened_goes() {
    let world = host();
    let (note, _) = install_unfinished(&world, DISK);
    let files = world.files();
    let told = world.clone();
    block_on(&world, async move {
        files.link(Path::new(DISK), &old_image(Path::new(DISK))).await.unwrap();
        let graph = Graph::open(&files, told.env(), Path::new(DISK), &OpenOptions::default()).await.unwrap();
        recover(&files, &graph).await.unwrap();
    });
    assert_eq!(world.file_number(&note), None, "the note is there still");
    assert_eq!(world.file_number(&old_image(Path::new(DISK))), None);
    assert!(world.file_number(Path::new(DISK)).is_some());
}

/// Another disk gets the new name while the disk is copied.
#[test]
fn what_lies_beside_a_name_that_another_disk_has_got_stays() {
    let world = host();
    let to = Path::new("/array/disk.raw");
    let files = Both::new(&world, false);
    files.trouble.name_is_taken.store(true, SeqCst);
    let told = block_on(&world, async move { move_disk(&files, to.into()).await.unwrap_err() });
    assert_eq!(told.kind(), ErrorKind::Exists, "{told}");
    for path in [to.to_owned(), names::changes(to), names::came(to)] {
        assert_eq!(text_of(&world, &path).as_deref(), Some("another disk's"), "{}", path.display());
    }
    assert!(world.file_number(Path::new(DISK)).is_some());
}

#[test]
fn what_lies_beside_a_name_that_another_disk_has_got_stays_when_a_half_goes() {
    let world = host();
    let disk = Path::new(THERE).join("disk.raw");
    let files = Both::new(&world, true);
    let told = block_on(&world, async move {
        files
            .with_receiver(async |receiver| {
                let disk = receiver.disk("disk.raw")?;
                receiver.begin("disk.raw", ID, SIZE as u64).await?;
                assert!(receiver.has_name(&disk).await?);
                for path in [disk.clone(), names::changes(&disk)] {
                    files.world.install(path, b"another disk's");
                }
                assert!(!receiver.has_name(&disk).await?);
                let marks = receiver.begin_marks("disk.raw", ID, 4096).await;
                assert_eq!(marks.unwrap_err().kind(), ErrorKind::Exists);
                receiver.drop_half("disk.raw", ID).await
            })
            .await
    });
    told.unwrap();
    assert!(world.file_number(&names::receiving(&disk)).is_none());
    assert_eq!(text_of(&world, &names::changes(&disk)).as_deref(), Some("another disk's"));
}

/// Moves the disk to a server that is no `spile receive`, where the first write ends with `error`. How often the export was opened.
fn move_to_export(error: Error) -> (World, Result<()>, usize) {
    let world = host();
    world.install(format!("{THERE}/export.raw"), &[0; SIZE]);
    let files = Both::new(&world, false);
    *files.trouble.next_write.lock().unwrap() = Some(error);
    let trouble = files.trouble.clone();
    let moved = block_on(&world, async move { move_disk(&files, export("export.raw")).await });
    (world, moved, trouble.opened.load(SeqCst))
}

#[test]
fn a_server_that_may_do_a_write_late_does_not_get_the_disk() {
    let late = Error::new(ErrorKind::TimedOut, "the server did not answer for 60 s").permanent();
    let (world, moved, opened) = move_to_export(late);
    let told = moved.unwrap_err();
    assert!(told.kind() == ErrorKind::TimedOut && told.to_string().contains("may still do it"), "{told}");
    assert!(told.to_string().contains("did not answer for 60 s"), "{told}");
    assert!(world.file_number(Path::new(DISK)).is_some() && opened == 1);
    assert_eq!(world.file_number(&names::moved(Path::new(DISK))), None);
}

#[test]
fn a_server_whose_link_is_cut_gets_the_disk_later() {
    for error in
        [Error::new(ErrorKind::Io, "the connection has ended"), Error::new(ErrorKind::TimedOut, "no way there")]
    {
        let (world, moved, opened) = move_to_export(error);
        moved.unwrap();
        assert!(world.file_number(Path::new(DISK)).is_none() && opened == 2);
    }
}
