//! What the other host keeps of a disk that has come to it, over the deaths of its process and of its own.

use std::fs;

use serde_json::Value;

use crate::common::moves::{job, receive, receive_after_reboot, to};
use crate::common::nbd::Client;
use crate::common::{eventually, json, ok, run_dir};
use crate::receive::{serve, world};

#[test]
fn what_is_lost_there_after_a_move_is_known_to_the_next_server_and_what_was_lost_of_the_copy_is_not_held_against_it() {
    let dir = world("receive-lost");
    let dir = dir.path();
    let there = receive(dir);
    let served = serve(dir, &["old/receive-lost.vhd"]);
    let begun = json(dir, &["move", "receive-lost", "--to", &to(dir, "disk.vhd"), "--rate", "4M", "--background"]);
    eventually("something was copied", || job(dir, "receive-lost")["done_bytes"].as_u64() > Some(0));
    there.kill();
    let there = receive(dir);
    ok(dir, &["job", begun["id"].as_str().unwrap(), "rate", "none"]);
    eventually("it is done", || job(dir, "receive-lost")["state"] == "done");
    let client = Client::connect(&served.uri()).unwrap();
    client.write(0, &[6; 4096], true).unwrap();
    assert!(served.terminate().success());
    // The link was cut while it was a copy: that was copied again.
    let served = serve(dir, &[&to(dir, "disk.vhd")]);
    let client = Client::connect(&served.uri()).unwrap();
    client.write(0, &[7; 4096], true).unwrap();
    // What is answered now, and not flushed, may be gone with the other host.
    client.write(4096, &[8; 4096], false).unwrap();
    there.kill();
    let Some(there) = receive_after_reboot(dir) else {
        println!("SKIP what_is_lost_there_after_a_move: no name space for mounts");
        return served.kill();
    };
    assert!(client.flush().is_err(), "a flush says that all is kept");
    served.kill();
    let again = serve(dir, &[&to(dir, "disk.vhd")]);
    let client = Client::connect(&again.uri()).unwrap();
    assert!(client.write(0, &[9; 4096], true).is_err(), "the next server does not know of the loss");
    ok(dir, &["accept-loss", &to(dir, "disk.vhd")]);
    client.write(0, &[9; 4096], true).unwrap();
    drop(client);
    assert!(again.terminate().success());
    there.kill();
}

/// The other host keeps what was answered, whatever becomes of its process, and says so.
#[test]
fn a_kill_there_after_a_move_loses_nothing_and_fails_no_flush_as_long_as_the_host_lives() {
    let dir = world("receive-kept");
    let dir = dir.path();
    let disk = &to(dir, "disk.vhd");
    let there = receive(dir);
    let served = serve(dir, &["old/receive-kept.vhd"]);
    ok(dir, &["move", "receive-kept", "--to", disk, "--wait"]);
    let client = Client::connect(&served.uri()).unwrap();
    client.write(0, &[1; 4096], false).unwrap();
    there.kill();
    let there = receive(dir);
    client.flush().unwrap();
    assert_eq!(json(dir, &["show", "receive-kept"])["failed_sync"], Value::Null);
    // This host's server dies before it has found the next one there. Its successor asks that.
    client.write(4096, &[2; 4096], false).unwrap();
    there.kill();
    // A note that is just being written has the number of its process in its name, and counts for nobody yet.
    let is_whole = |name: &str| name.matches('.').count() == 1;
    let names = || fs::read_dir(run_dir().join("unflushed")).into_iter().flatten();
    let noted = || names().filter(|name| is_whole(name.as_ref().unwrap().file_name().to_str().unwrap())).count();
    eventually("it is noted that the connection is lost", || noted() == 1);
    served.kill();
    let there = receive(dir);
    let served = serve(dir, &[disk]);
    let client = Client::connect(&served.uri()).unwrap();
    client.flush().unwrap();
    assert_eq!(noted(), 0, "it is flushed");
    let mut found = [0; 8192];
    client.read(0, &mut found).unwrap();
    assert_eq!((found[0], found[4095], found[4096], found[8191]), (1, 1, 2, 2));
    // The same, and the other host was started anew meanwhile.
    client.write(8192, &[3; 4096], false).unwrap();
    there.kill();
    eventually("it is noted again", || noted() == 1);
    served.kill();
    let Some(there) = receive_after_reboot(dir) else {
        println!("SKIP a_kill_there_after_a_move, after a reboot: no name space for mounts");
        return;
    };
    let served = serve(dir, &[disk]);
    let client = Client::connect(&served.uri()).unwrap();
    assert!(client.flush().is_err(), "what was not flushed is gone");
    drop(client);
    ok(dir, &["accept-loss", disk]);
    assert!(served.terminate().success());
    there.kill();
}
