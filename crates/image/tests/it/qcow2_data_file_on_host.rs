//! Images that keep their data in another file, on real files under the engine. qemu-img makes some of them, and checks and reads all of them.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use spile_core::{Disk, Extent, Segments, WriteZeroes};
use spile_engine::{Config, Engine, EngineKind, OsEnv};
use spile_image::create::{NewDataFile, NewImage, Options};
use spile_image::{Format, Graph, OpenOptions};
use spile_node::Aligned;
use spile_store::{CacheMode, OsFiles};

const SIZE: u64 = (5 << 20) + 1536;

fn qemu(dir: &Path, line: &str) -> bool {
    let mut words = line.split(' ');
    let out = Command::new(words.next().unwrap()).args(words).current_dir(dir).output();
    match out {
        Ok(out) if out.status.success() => true,
        Ok(out) => panic!("{line}: {}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr)),
        Err(_) => false,
    }
}

fn engine() -> Engine {
    Engine::start(Config { kind: EngineKind::Threads, workers: 2, pool_bytes: 16 << 20, ..Config::default() }).unwrap()
}

/// Changes the image at `path`, with the life of a process after each round: closed, or ended without that. Returns what it must read as.
fn change(engine: &Engine, path: &Path, mut expected: Vec<u8>, seed: u64) -> Vec<u8> {
    for round in 0..4 {
        let path = path.to_owned();
        expected = engine.run_on(0, move || async move {
            let options = OpenOptions { allow_data_file: true, ..OpenOptions::default() };
            let files = OsFiles::new(CacheMode::Direct);
            let disk = Aligned::new(Graph::open(&files, Arc::new(OsEnv), &path, &options).await.unwrap());
            let mut random = seed * 100 + round + 1;
            for step in 0..40 {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let start = (random >> 20) % (SIZE / 512) * 512;
                let end = (start + ((random >> 40) % 300 + 1) * 512).min(SIZE);
                let extent = Extent::from_range(start..end);
                let place = start as usize..end as usize;
                match step % 5 {
                    0..3 => {
                        let memory = Segments::zeroed(place.len());
                        memory.copy_from_slice(0, &vec![random as u8 | 1; place.len()]);
                        disk.write(extent, &memory, false).await.unwrap();
                        expected[place].fill(random as u8 | 1);
                    }
                    step => {
                        let how = WriteZeroes { may_unmap: step == 3, only_if_fast: false };
                        disk.write_zeroes(extent, how).await.unwrap();
                        expected[place].fill(0);
                    }
                }
            }
            if round % 2 == 1 {
                disk.close().await.unwrap();
            }
            expected
        });
    }
    expected
}

/// What the image must read as, for qemu-img and byte by byte in a raw data file.
fn holds(dir: &Path, expected: &[u8], is_raw: bool) {
    std::fs::write(dir.join("truth.raw"), expected).unwrap();
    qemu(dir, "qemu-img check -q -f qcow2 -r leaks a.qcow2");
    qemu(dir, "qemu-img check -q -f qcow2 a.qcow2");
    qemu(dir, "qemu-img compare -q -f qcow2 -F raw a.qcow2 truth.raw");
    // QEMU has it end with a whole cluster.
    let alone = std::fs::read(dir.join("a.data")).unwrap();
    let (disk, rest) = alone.split_at(expected.len());
    assert!(!is_raw || disk == expected && rest.iter().all(|byte| *byte == 0), "the raw data file is the disk");
}

/// Turns of Spile and QEMU at the image in `dir`, whose disk is all zeroes.
fn turns(dir: &Path, is_raw: bool, seed: u64) {
    let engine = engine();
    let path = dir.join("a.qcow2");
    let mut expected = change(&engine, &path, vec![0; SIZE as usize], seed);
    holds(dir, &expected, is_raw);
    let io = "qemu-io -f qcow2 -d unmap a.qcow2";
    for (command, range, byte) in [
        ("discard", 1 << 20..3 << 20, 0),
        ("write -z -u", 3 << 20..4 << 20, 0),
        ("write -P 9", 70000 / 512 * 512..300032, 9),
    ] {
        let out = Command::new("qemu-io")
            .args(io.split(' ').skip(1))
            .arg("-c")
            .arg(format!("{command} {} {}", range.start, range.end - range.start))
            .current_dir(dir)
            .output()
            .unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        expected[range].fill(byte);
    }
    holds(dir, &expected, is_raw);
    let expected = change(&engine, &path, expected, seed + 1);
    holds(dir, &expected, is_raw);
    engine.shutdown();
}

fn have_qemu(dir: &Path, test: &str) -> bool {
    let have = qemu(dir, "qemu-img --version") && qemu(dir, "qemu-io --version");
    if !have {
        println!("SKIP {test}: no qemu-img");
    }
    have
}

#[test]
fn qemu_makes_images_with_data_files_and_reads_what_is_written() {
    for (number, options) in ["", ",extended_l2=on", ",cluster_size=4k"].into_iter().enumerate() {
        for is_raw in [false, true] {
            let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
            let dir = dir.path();
            if !have_qemu(dir, "qemu_makes_images_with_data_files_and_reads_what_is_written") {
                return;
            }
            let raw = if is_raw { "on" } else { "off" };
            let made = format!("data_file=a.data,data_file_raw={raw}{options}");
            qemu(dir, &format!("qemu-img create -q -f qcow2 -o {made} a.qcow2 {SIZE}"));
            turns(dir, is_raw, number as u64);
        }
    }
}

#[test]
fn qemu_finds_nothing_wrong_with_new_images_with_data_files() {
    for (number, extended) in [false, true].into_iter().enumerate() {
        for is_raw in [false, true] {
            let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
            let dir = dir.path();
            if !have_qemu(dir, "qemu_finds_nothing_wrong_with_new_images_with_data_files") {
                return;
            }
            let (engine, image, data) = (engine(), dir.join("a.qcow2"), dir.join("a.data"));
            engine.run_on(0, move || async move {
                let files = OsFiles::new(CacheMode::Page);
                drop(files.create(&data, SIZE).unwrap());
                let data_file = Some(NewDataFile { path: "a.data".into(), is_raw });
                let options = Options { data_file, extended_l2: Some(extended), ..Options::default() };
                let store = files.create(&image, 0).unwrap();
                Format::Qcow2.create(&store, &OsEnv, &NewImage { options, ..NewImage::new(SIZE) }).await.unwrap();
            });
            engine.shutdown();
            holds(dir, &vec![0; SIZE as usize], is_raw);
            turns(dir, is_raw, 10 + number as u64);
        }
    }
}
