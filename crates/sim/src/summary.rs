//! [`summary!`]: what runs that found nothing have done, in numbers that add up.

/// Makes a structure of counts, and adds one to another.
macro_rules! summary {
    ($(#[$about:meta])* pub struct $name:ident { $($(#[$doc:meta])* pub $count:ident: u64,)* }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $name {
            $($(#[$doc])* pub $count: u64,)*
        }

        impl std::ops::AddAssign for $name {
            fn add_assign(&mut self, other: Self) {
                $(self.$count += other.$count;)*
            }
        }

        /// The counts by their names, on one line.
        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let all = [$((stringify!($count), self.$count),)*];
                let words: Vec<String> = all.iter().map(|(name, n)| format!("{} {n}", name.replace('_', " "))).collect();
                f.write_str(&words.join(", "))
            }
        }
    };
}
