//! The servers and guests of `density`, and what is counted of them.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use spile_core::{Error, Result, ResultExt};
use spile_engine::{Config, Engine, OsEnv};
use spile_image::Format;
use spile_image::create::NewImage;
use spile_lab::GuestQueue;
use spile_lab::vhost::{Device, DeviceOptions, Queue, QueueOptions};
use spile_server::serving::api::client::{LOOK_PATIENCE, ask};
use spile_server::serving::api::workers::Workers;
use spile_store::{CacheMode, OsFiles};

use super::{Layout, Parameters};
use crate::experiments::folder::Folder;
use crate::experiments::process::{Tied, disk_argument};
use crate::experiments::usage::Usage;

/// Servers with idle disks, and their guests.
pub struct Hosts {
    // Guests leave before their servers end.
    guests: Vec<(Device, Vec<Queue>)>,
    servers: Vec<Server>,
    _images: Option<Images>,
}

/// One server.
struct Server {
    process: Tied,
    control: PathBuf,
    guests: Vec<PathBuf>,
}

/// What was counted of all servers up to one moment.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Wake-ups of workers by a guest or client.
    pub kick: u64,
    /// Wake-ups of workers by a store.
    pub completion: u64,
    /// Wake-ups of workers by another thread.
    pub control: u64,
    /// Wake-ups of workers by the clock.
    pub timer: u64,
    /// What the processes used before they were asked: the end of a row.
    pub row_end: Usage,
    /// What they had used when they had answered: the start of the next row.
    pub row_start: Usage,
}

impl Hosts {
    /// Starts the servers of so many disks, and waits until they serve.
    ///
    /// # Errors
    /// When an image cannot be made, or a server does not start.
    pub fn start(parameters: &Parameters, folder: &Path, layout: Layout, disks: u32) -> Result<Self> {
        let folder = folder.join(format!("{layout:?}").to_lowercase());
        make_folder(&folder)?;
        let images = parameters.format.map(|format| Images::new(parameters, &folder, format, disks)).transpose()?;
        let disk = |number: u32, options: &str| match &images {
            Some(images) => disk_argument(&images.path(number), options),
            None => format!("null:{}{options}", parameters.disk_bytes).into(),
        };
        let numbers: Vec<u32> = (0..disks).collect();
        let parts: Vec<&[u32]> = match layout {
            Layout::Shared => vec![&numbers[..]],
            Layout::Each => numbers.chunks(1).collect(),
        };
        let servers = parts.iter().map(|part| Server::start(&folder, part, disk)).collect::<Result<_>>()?;
        Ok(Self { guests: Vec::new(), servers, _images: images })
    }

    /// Connects a guest to each disk. Each of its queues has one request, and is idle then.
    ///
    /// # Errors
    /// When a server refuses a guest, or a request fails.
    pub fn connect(&mut self, queues: u16) -> Result<()> {
        for socket in self.servers.iter().flat_map(|server| &server.guests) {
            let mut device = Device::connect(socket, DeviceOptions::default())?;
            let options = QueueOptions { queues, depth: 2, data_bytes: 4096, ..QueueOptions::default() };
            let mut queues = device.start(&options)?;
            for queue in &mut queues {
                queue.run_well(Queue::READ, 0, 512)?;
            }
            self.guests.push((device, queues));
        }
        Ok(())
    }

    /// How many processes there are.
    pub fn processes(&self) -> u32 {
        self.servers.len() as u32
    }

    /// What was counted up to now. The servers are asked, which no row is to have.
    ///
    /// # Errors
    /// When a server has ended or does not answer.
    pub fn counts(&self) -> Result<Counts> {
        let mut counts = Counts { row_end: self.usage()?, ..Counts::default() };
        for server in &self.servers {
            let answer: Workers = ask(&server.control, "GET", "/v1/workers", LOOK_PATIENCE)?;
            for worker in &answer.workers {
                counts.kick += worker.wakeups_kick;
                counts.completion += worker.wakeups_completion;
                counts.control += worker.wakeups_control;
                counts.timer += worker.wakeups_timer;
            }
        }
        // The answer is there before the thread that wrote it sleeps again.
        std::thread::sleep(std::time::Duration::from_millis(50));
        counts.row_start = self.usage()?;
        Ok(counts)
    }

    fn usage(&self) -> Result<Usage> {
        let mut sum = Usage::default();
        for server in &self.servers {
            sum += Usage::of(server.process.id())?;
        }
        Ok(sum)
    }
}

impl Server {
    fn start(folder: &Path, disks: &[u32], disk: impl Fn(u32, &str) -> OsString) -> Result<Self> {
        let first = disks.first().copied().unwrap_or(0);
        let control = folder.join(format!("control-{first}"));
        let guests: Vec<PathBuf> = disks.iter().map(|number| folder.join(format!("guest-{number}"))).collect();
        let mut args: Vec<OsString> = vec!["serve".into(), "--control".into(), control.clone().into()];
        for number in disks {
            args.push(disk(*number, &format!(",name=d{number}")));
        }
        for (number, socket) in disks.iter().zip(&guests) {
            args.extend(["--vhost-user".into(), format!("{},export=d{number}", socket.display()).into()]);
        }
        let mut process = Tied::start(format!("the server of {} disks", disks.len()), args)?;
        process.wait_for(guests.iter().chain([&control]))?;
        Ok(Self { process, control, guests })
    }
}

/// The images, removed at the end.
struct Images {
    folder: PathBuf,
    format: Format,
    /// The folder of a named place.
    _own: Option<Folder>,
}

impl Images {
    fn new(parameters: &Parameters, folder: &Path, format: Format, count: u32) -> Result<Self> {
        let own = parameters.folder.as_deref().map(|parent| Folder::inside(parent, "density")).transpose()?;
        let folder = own.as_ref().map_or(folder, Folder::path).join("images");
        make_folder(&folder)?;
        let images = Self { folder, format, _own: own };
        let engine = Engine::start(Config { workers: 1, ..Config::default() })?;
        let paths: Vec<PathBuf> = (0..count).map(|number| images.path(number)).collect();
        let size_bytes = parameters.disk_bytes;
        let made = engine.run_on(0, move || async move {
            let new = NewImage::new(size_bytes);
            let files = OsFiles::new(CacheMode::Page);
            for path in &paths {
                let store = spile_core::Files::create(&files, path, 0).await?;
                format.create(&store, &OsEnv, &new).await?;
            }
            Ok(())
        });
        engine.shutdown();
        made.map(|()| images)
    }

    fn path(&self, number: u32) -> PathBuf {
        self.folder.join(format!("d{number}.{}", self.format))
    }
}

impl Drop for Images {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn make_folder(path: &Path) -> Result<()> {
    std::fs::create_dir(path).map_err(|e| Error::io("make the folder", e)).at_path(path)
}
