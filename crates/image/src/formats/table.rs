//! The macro that turns the table of formats into code: the enum of formats, the enum of opened layers, and the
//! delegation to each. A call costs one match; there is no dynamic dispatch.

/// One match over all variants: `each!([A B], self, layer, layer.size_bytes())`.
macro_rules! each {
    ([$($name:ident)+], $self:ident, $layer:ident, $call:expr) => {
        match $self {
            $(Self::$name($layer) => $call,)+
        }
    };
}

/// Methods of [`Layer`](crate::layer::Layer) that ask the same of whichever format's layer there is.
macro_rules! delegate {
    ($names:tt $(fn $method:ident(&$self:ident $(, $arg:ident: $type:ty)*) -> $answer:ty;)+) => {
        $(fn $method(&$self $(, $arg: $type)*) -> $answer {
            each!($names, $self, layer, layer.$method($($arg),*))
        })+
    };
    ($names:tt $(async fn $method:ident(&$self:ident $(, $arg:ident: $type:ty)*) -> $answer:ty;)+) => {
        $(async fn $method(&$self $(, $arg: $type)*) -> $answer {
            each!($names, $self, layer, layer.$method($($arg),*).await)
        })+
    };
}

macro_rules! formats {
    ($($about:literal, $name:ident => $format:ty;)+) => {
        /// An image format.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Format {
            $(#[doc = $about] $name,)+
        }

        impl Format {
            /// Every format, in the order in which messages name them.
            pub const ALL: &[Self] = &[$(Self::$name),+];

            /// Names and abilities.
            pub fn about(self) -> &'static About {
                match self {
                    $(Self::$name => &<$format as ImageFormat>::ABOUT,)+
                }
            }

            async fn open_any<S: Store>(self, store: S, env: &Arc<dyn Env>, how: OpenLayer) -> Result<AnyLayer<S>> {
                match self {
                    $(Self::$name => <$format>::open(store, env, how).await.map(AnyLayer::$name),)+
                }
            }

            /// What the image in `store` says of its parent, as [`ImageFormat::named_parent`] says.
            ///
            /// # Errors
            /// As [`ImageFormat::named_parent`].
            pub async fn named_parent<S: Store>(self, store: &S) -> Result<Option<ParentRef>> {
                match self {
                    $(Self::$name => <$format as ImageFormat>::named_parent(store).await,)+
                }
            }

            /// The file that the image in `store` says holds its data, as [`ImageFormat::named_data_file`] says.
            ///
            /// # Errors
            /// As [`ImageFormat::named_data_file`].
            pub async fn named_data_file<S: Store>(self, store: &S) -> Result<Option<PathBuf>> {
                match self {
                    $(Self::$name => <$format as ImageFormat>::named_data_file(store).await,)+
                }
            }

            async fn create_any<S: Store>(self, store: &S, env: &dyn Env, new: &NewImage) -> Result<()> {
                match self {
                    $(Self::$name => <$format>::create(store, env, new).await,)+
                }
            }

            fn space_any(self, new: &NewImage) -> Result<Space> {
                match self {
                    $(Self::$name => <$format as ImageFormat>::space(new),)+
                }
            }

            /// Checks the image in `store`, as [`ImageFormat::check`] says.
            ///
            /// # Errors
            /// As [`ImageFormat::check`].
            pub async fn check<S: Store>(self, store: &S, env: &dyn Env) -> Result<Report> {
                match self {
                    $(Self::$name => <$format as ImageFormat>::check(store, env).await,)+
                }
            }

            /// Mends the image in `store`, as [`ImageFormat::repair`] says.
            ///
            /// # Errors
            /// As [`ImageFormat::repair`].
            pub async fn repair<S: Store>(self, store: &S, env: &dyn Env, lost: Lost) -> Result<Report> {
                match self {
                    $(Self::$name => <$format as ImageFormat>::repair(store, env, lost).await,)+
                }
            }
        }

        /// An opened image of any format.
        pub enum AnyLayer<S: Store> {
            $(#[doc = $about] $name(<$format as ImageFormat>::Layer<S>),)+
        }

        /// A reservation in an image of any format.
        pub enum AnyReserved<'a, S: Store> {
            $(#[doc = $about] $name(<<$format as ImageFormat>::Layer<S> as Layer<S>>::Reserved<'a>),)+
        }

        impl<S: Store> AnyLayer<S> {
            /// The image's format.
            pub fn format(&self) -> Format {
                match self {
                    $(Self::$name(_) => Format::$name,)+
                }
            }
        }

        impl<S: Store> Reserved for AnyReserved<'_, S> {
            fn offset(&self) -> StoreOffset {
                match self {
                    $(Self::$name(reserved) => reserved.offset(),)+
                }
            }

            fn around(&self) -> (u64, u64) {
                match self {
                    $(Self::$name(reserved) => reserved.around(),)+
                }
            }

            fn publishes(&self) -> bool {
                match self {
                    $(Self::$name(reserved) => reserved.publishes(),)+
                }
            }

            async fn publish(&mut self) -> Result<()> {
                match self {
                    $(Self::$name(reserved) => reserved.publish().await,)+
                }
            }

            fn abandon(self) {
                match self {
                    $(Self::$name(reserved) => reserved.abandon(),)+
                }
            }

            async fn commit(self) -> Result<()> {
                match self {
                    $(Self::$name(reserved) => reserved.commit().await,)+
                }
            }
        }

        impl<S: Store> Layer<S> for AnyLayer<S> {
            type Reserved<'a> = AnyReserved<'a, S> where S: 'a;

            delegate! { [$($name)+]
                fn store(&self) -> &S;
                fn data_store(&self) -> &S;
                fn data_file(&self) -> Result<Option<PathBuf>>;
                fn size_bytes(&self) -> u64;
                fn via(&self) -> Via;
                fn request_align_bytes(&self) -> u32;
                fn find(&self, at: u64, len_bytes: u64) -> (Found, u64);
                fn locate(&self, at: u64, len_bytes: u64) -> (Found, u64);
                fn hole_kind(&self) -> ExtentKind;
                fn enter(&self) -> Option<Reader<'_>>;
                fn part_len(&self, extent: Extent) -> u64;
                fn unit(&self, part: Extent) -> Extent;
                fn in_place(&self, extent: Extent) -> Option<StoreOffset>;
                fn next_held(&self, extent: Extent) -> Option<Extent>;
                fn identity(&self) -> Option<Identity>;
                fn has_inner_snapshots(&self) -> bool;
                fn is_unflushed(&self) -> bool;
                fn check_name(&self, parent: &NewParent) -> Result<()>;
                fn check_resize(&self, size_bytes: u64) -> Result<()>;
                fn begin(&self) -> ();
                fn hold_space(&self, holds: bool) -> ();
                fn allocations(&self) -> u64;
                fn watch_room(&self, hear: HearRoom) -> bool;
                fn facts(&self) -> Facts;
            }

            delegate! { [$($name)+]
                async fn load(&self, piece: MapPiece) -> Result<()>;
                async fn read_encoded(&self, unit: EncodedUnit, within_bytes: u32, into: &Segments) -> Result<()>;
                async fn zero(&self, part: Extent, may_unmap: bool, below_is_zero: bool) -> Result<bool>;
                async fn unmap(&self, part: Extent, below_is_zero: bool) -> Result<()>;
                async fn next_own(&self, extent: Extent) -> Result<Option<Extent>>;
                async fn keep_copies_out(&self, part: Extent) -> Option<RangeGuard<'_>>;
                async fn forget(&self, part: Extent) -> Result<()>;
                async fn give_back(&self, most_bytes: u64, timer: &dyn Timer) -> Result<GivenBack>;
                async fn own_zeroes(&self, part: Extent) -> Result<()>;
                async fn set_parent(&self, parent: Option<&NewParent>) -> Result<()>;
                async fn flush(&self) -> Result<()>;
                async fn rest(&self) -> ();
                async fn seal(&self) -> Result<()>;
                async fn look_for_room(&self) -> Result<()>;
                async fn resize(&self, size_bytes: u64) -> Result<()>;
                async fn resize_unused(&self, size_bytes: u64) -> Result<()>;
                async fn amend(&self, asked: &Amendment) -> Result<Amended>;
                async fn inner_snapshots(&self) -> Result<Vec<InnerSnapshot>>;
                async fn change_inner_unused(&self, change: &InnerChange, watch: &dyn InnerWatch) -> Result<InnerSnapshot>;
                async fn bitmaps(&self) -> Result<Option<Vec<InnerBitmap>>>;
                async fn bitmap_part(&self, name: &str, within: std::ops::Range<u64>) -> Result<BitmapPart>;
                async fn keep_bitmaps(&self, kept: KeptBitmaps) -> Result<Vec<String>>;
                async fn remove_bitmap(&self, name: &str) -> Result<()>;
                async fn parent(&self) -> Result<Option<ParentRef>>;
            }

            fn attach_data_file(&mut self, store: S) {
                each!([$($name)+], self, layer, layer.attach_data_file(store))
            }

            async fn reserve(&self, part: Extent) -> Result<AnyReserved<'_, S>> {
                match self {
                    $(Self::$name(layer) => layer.reserve(part).await.map(AnyReserved::$name),)+
                }
            }
        }
    };
}
