//! What a note says of a disk that was moved stays true, whatever ends then.

use std::path::PathBuf;

use spile_core::{ErrorKind, Files};
use spile_life::motion::take_back;
use spile_life::names;
use spile_sim::World;
use spile_sim::exec::{Ended, Executor, block_on};
use spile_sim::plan::Plan;
use spile_sim::rng::Rng;

/// A process is killed right after it took the old image its name. The next one tells where the disk is; the power goes, and the old name must not come back.
#[test]
fn a_name_that_is_said_to_be_gone_does_not_come_back_with_the_power() {
    let (disk, hardware) = (PathBuf::from("/images/disk.raw"), Plan::draw(0, 1 << 20, 4096).hardware);
    for seed in 0..50 {
        let world = World::new(seed, hardware.clone());
        world.install(&disk, b"the disk as it was");
        let note = b"spile moved 1\nto nbd://there/disk.raw\nimage /images/disk.moved.raw\nend\n";
        world.install(names::moved(&disk), note);
        let (mut executor, files, path) = (Executor::new(world.clone(), Rng::new(seed)), world.files(), disk.clone());
        executor.spawn(async move { drop(files.remove(&path).await) });
        let killed_at =
            (1..100).find(|steps| executor.run(*steps) == Ended::Stopped && world.file_number(&disk).is_none());
        assert!(killed_at.is_some(), "it was not killed in time");
        world.kill();
        let (files, path) = (world.files(), disk.clone());
        let told = block_on(&world, async move { take_back(&files, &path, true).await });
        assert_eq!(told.map_err(|error| error.kind()), Err(ErrorKind::NotFound));
        world.cut_power();
        assert_eq!(world.file_number(&disk), None, "seed {seed}: there are two disks");
    }
}
